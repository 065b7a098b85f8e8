// Behaviour of the page; see page.html. Plain JavaScript, no libraries.
"use strict";
const $ = (id) => document.getElementById(id);
const data = JSON.parse($("data").textContent);
const E = data.epochs.length, n = data.sites.length;
const boxes = new Map([...document.querySelectorAll("#graph .node")].map((g) => [g.dataset.id, g]));
const nodes = new Map(data.nodes.map((node) => [node.id, node]));
const state = { epoch: 1, node: null, search: "" };
const isLow = (node, epoch = state.epoch) => data.epochs[epoch - 1].mask[node.index] === "1";

// The view: `scale`, and the offset (x, y) of the graph's origin in the canvas.
const canvas = $("canvas"), [left, upper, right, bottom] = data.extent;
const view = { x: 0, y: 0, scale: 1 };
const clamp = (value, low, high) => Math.min(high, Math.max(low, value));
function show() {
  $("view").setAttribute("transform", `translate(${view.x} ${view.y}) scale(${view.scale})`);
  const size = { x: -view.x, y: -view.y, width: canvas.clientWidth, height: canvas.clientHeight };
  for (const [key, value] of Object.entries(size)) $("lens").setAttribute(key, value / view.scale);
}
function zoom(factor, x = canvas.clientWidth / 2, y = canvas.clientHeight / 2) {
  const scale = clamp(view.scale * factor, 0.02, 5);
  view.x = x - (x - view.x) * scale / view.scale;
  view.y = y - (y - view.y) * scale / view.scale;
  view.scale = scale;
  show();
}
function centre(x, y) {
  const map = $("map").clientWidth + 24, panel = $("panel").hidden ? 0 : $("panel").clientWidth;
  view.x = (map + canvas.clientWidth - panel) / 2 - x * view.scale;
  view.y = canvas.clientHeight / 2 - y * view.scale;
  show();
}
function centreOn(node) {
  view.scale = clamp(view.scale, 0.8, 2);
  const [x, y, width, height] = node.box;
  centre(x + width / 2, y + height / 2);
}
function fit() {
  view.scale = Math.min(1.5, (canvas.clientWidth - 240) / (right - left), (canvas.clientHeight - 30) / (bottom - upper));
  centre((left + right) / 2, (upper + bottom) / 2);
}
function start() {  // legible, at the top
  view.scale = clamp((canvas.clientWidth - 240) / (right - left), 0.5, 1);
  centre((left + right) / 2, upper + (canvas.clientHeight / 2 - 24) / view.scale);
}

let drag = null;
canvas.addEventListener("pointerdown", (event) => {
  if (event.button !== 0) return;
  drag = { x: event.clientX, y: event.clientY, far: false, node: event.target.closest(".node") };
  canvas.setPointerCapture(event.pointerId);
});
canvas.addEventListener("pointermove", (event) => {
  if (!drag) return;
  const dx = event.clientX - drag.x, dy = event.clientY - drag.y;
  if (!drag.far && Math.hypot(dx, dy) < 4) return;
  Object.assign(drag, { far: true, x: event.clientX, y: event.clientY });
  canvas.classList.add("dragging");
  view.x += dx;
  view.y += dy;
  show();
});
canvas.addEventListener("pointerup", () => {
  if (drag && !drag.far) drag.node ? pick(nodes.get(drag.node.dataset.id)) : pick(null);
  drag = null;
  canvas.classList.remove("dragging");
});
canvas.addEventListener("pointercancel", () => { drag = null; });
canvas.addEventListener("wheel", (event) => {
  event.preventDefault();
  const area = canvas.getBoundingClientRect(), step = event.deltaY * (event.deltaMode ? 16 : 1);
  zoom(Math.exp(-step * 0.0016), event.clientX - area.left, event.clientY - area.top);
}, { passive: false });
$("map").setAttribute("viewBox", `${left} ${upper} ${right - left} ${bottom - upper}`);
function travel(event) {
  if (!event.buttons) return;
  const at = new DOMPoint(event.clientX, event.clientY).matrixTransform($("map").getScreenCTM().inverse());
  centre((left + right) / 2, clamp(at.y, upper, bottom));
}
$("map").addEventListener("pointerdown", travel);
$("map").addEventListener("pointermove", travel);
$("in").onclick = () => zoom(1.3);
$("out").onclick = () => zoom(1 / 1.3);
$("fit").onclick = fit;

// Side panel
const times = (shape) => shape.length ? shape.join(" × ") : "scalar";
function flops(count) {
  const power = clamp(Math.floor(Math.log10(Math.max(count, 1)) / 3), 0, 4);
  return `${+(count / 1000 ** power).toPrecision(4)} ${["", "K", "M", "G", "T"][power]}FLOP per sample, forward`;
}
function describe(node) {
  const site = node.site !== undefined;
  const lows = site ? data.epochs.filter((_, i) => isLow(node, i + 1)).length : 0;
  return [
    ["op", node.op + (node.geometry ? ` (${node.geometry})` : "")],
    ["node", node.id, "code"],
    ["module", node.scope || null, "code"],
    ["weight shape", node.weight_shape && times(node.weight_shape)],
    ["input shape", node.input_shape ? times(node.input_shape) : site && "not known before the first forward"],
    ["output shape", node.shape ? times(node.shape) : site && "not known before the first forward"],
    ["FLOPs", node.flops === undefined ? site && "not known before the first forward" : flops(node.flops)],
    ["precision", site && (isLow(node) ? `low (${data.low})` : data.others), site && isLow(node) ? "chip low" : "chip"],
    ["recipe in low precision", site && data.recipe],
    ["its operands", site && data.operands],
    ["over the schedule", site && data.scheduled && `${data.low} in ${lows} of ${E} epochs`],
    ["kernel", node.kernel],
    ["not a site", node.skipped],
    ["origin pass", node.origin, "code"],
    ["source line", node.source, "code"],
  ].filter(([, value]) => value);
}
function fillPanel() {
  if (!state.node) return;
  $("name").textContent = state.node.label;
  $("facts").replaceChildren(...describe(state.node).flatMap(([term, value, style]) => {
    const dt = document.createElement("dt"), dd = document.createElement("dd");
    dt.textContent = term;
    const inner = style?.startsWith("chip") ? dd.appendChild(document.createElement("span")) : dd;
    inner.textContent = value;
    inner.className = style ?? "";
    dd.dataset.fact = term;
    return [dt, dd];
  }));
}
function pick(node) {
  if (state.node) boxes.get(state.node.id).classList.remove("picked");
  if (!node && $("panel").contains(document.activeElement)) boxes.get(state.node.id).focus({ preventScroll: true });
  state.node = node;
  $("panel").hidden = !node;
  $("legend").hidden = !!node;
  if (node) boxes.get(node.id).classList.add("picked");
  fillPanel();
  drawStrip();
  writeLink();
}
$("close").onclick = () => pick(null);

// Search
let hits = [], hit = 0;
function search(text, move = true) {
  state.search = text.trim();
  const wanted = state.search.toLowerCase();
  const matches = (node) => [node.label, node.id, node.op, node.scope].some((word) => word.toLowerCase().includes(wanted));
  hits = wanted ? data.nodes.filter(matches) : [];
  hits.sort((a, b) => (b.label.toLowerCase() === wanted) - (a.label.toLowerCase() === wanted));
  hit = 0;
  const found = new Set(hits.map((node) => node.id));
  for (const [id, g] of boxes) g.classList.toggle("hit", found.has(id));
  $("graph").classList.toggle("searching", wanted !== "");
  tellHits();
  if (hits.length && move) centreOn(hits[0]);
  writeLink();
}
function tellHits() {
  $("found").textContent = !state.search ? "" : hits.length ? `${hit + 1} of ${hits.length}` : "no match";
}
$("search").addEventListener("input", (event) => search(event.target.value));
$("search").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || !hits.length) return;
  if (state.node === hits[hit]) hit = (hit + 1) % hits.length;
  tellHits();
  pick(hits[hit]);
  centreOn(hits[hit]);
});

// Epochs
function setEpoch(epoch) {
  state.epoch = clamp(Math.round(epoch) || 1, 1, E);
  for (const node of data.nodes) {
    const g = boxes.get(node.id), low = node.site !== undefined && isLow(node);
    g.setAttribute("aria-label", `${node.label}, ${node.op}` + (node.site ? `, ${low ? `low precision ${data.low}` : data.others}` : ""));
    if (node.site === undefined) continue;
    g.classList.toggle("low", low);
    g.classList.toggle("full", !low);
  }
  const { policy, mask } = data.epochs[state.epoch - 1], k = mask.split("1").length - 1;
  const inLow = `${k} of ${n} sites in ${data.recipe}` + (data.others === "full precision" ? "" : `, the others in ${data.others}`);
  const when = `epoch ${state.epoch} of ${E}`, what = `policy ${policy}, ${inLow}`;
  $("status").textContent = data.scheduled ? `${when}, ${what}` : what;
  $("epoch").value = state.epoch;
  $("epoch").setAttribute("aria-valuetext", `${when}, ${inLow}`);
  $("shown").textContent = `${state.epoch} of ${E}`;
  $("now").style.cssText = `left:calc(${(state.epoch - 1) / E * 100}% - 1px);width:calc(${100 / E}% + 2px)`;
  fillPanel();
  writeLink();
}
function drawStrip() {
  if (!data.scheduled) return;
  const heat = $("heat"), colour = getComputedStyle(document.documentElement);
  const height = clamp(5 * n, 24, 110);
  heat.style.height = `${height}px`;
  const wide = heat.clientWidth * devicePixelRatio, tall = height * devicePixelRatio / n;
  Object.assign(heat, { width: wide, height: tall * n });
  const pen = heat.getContext("2d");
  const gap = wide / E > 4 ? 1 : 0, seam = tall > 3 ? 1 : 0;
  data.epochs.forEach(({ mask }, e) => data.sites.forEach((site, s) => {
    pen.fillStyle = colour.getPropertyValue(mask[s] === "1" ? "--low" : "--full");
    pen.globalAlpha = !state.node || state.node.site === undefined || state.node.site === site ? 1 : 0.35;
    pen.fillRect(e * wide / E, s * tall, wide / E - gap, tall - seam);
  }));
}
function under(event) {
  const area = $("heat").getBoundingClientRect();
  const at = (position, size, count) => clamp(Math.floor(position / size * count), 0, count - 1);
  return { epoch: at(event.clientX - area.left, area.width, E) + 1, site: at(event.clientY - area.top, area.height, n) };
}
$("strip").addEventListener("pointermove", (event) => {
  const { epoch, site } = under(event);
  $("strip").title = `epoch ${epoch}, ${data.sites[site]}: ${data.epochs[epoch - 1].mask[site] === "1" ? data.low : data.others}`;
  if (event.buttons) setEpoch(epoch);
});
$("strip").addEventListener("pointerdown", (event) => setEpoch(under(event).epoch));
$("epoch").addEventListener("input", (event) => setEpoch(+event.target.value));
let playing = null;
function play(on) {
  clearInterval(playing);
  playing = null;
  if (on && state.epoch === E) setEpoch(1);
  if (on) playing = setInterval(() => state.epoch < E ? setEpoch(state.epoch + 1) : play(false), 600);
  $("play").textContent = on ? "❚❚" : "▶";
  $("play").setAttribute("aria-label", on ? "Pause" : "Play the schedule");
}
$("play").onclick = () => play(playing === null);

// The private program: passes, parameters, and the lines of forward and backward
function element(tag, text = "", name = "") {
  return Object.assign(document.createElement(tag), { textContent: text, className: name });
}
function fillPrivate() {
  const { passes, programs, parameters } = data.private, parts = [], places = new Map();
  const code = programs.map(([name, lines]) => {
    const list = element("ol", "", "code");
    lines.forEach(([text, kind], i) => {
      const item = element("li", text, kind);
      item.tabIndex = kind ? 0 : -1;
      if (kind) places.set(text.split(" = ")[0].trim(), item);
      item.id = `${name}-${i + 1}`;
      list.append(item);
    });
    return [element("h2", `${name}: ${lines.length} lines`), list];
  });
  const legend = element("p", "Per-sample norms, then clip factors of them, then sums weighted by the factors: ");
  for (const [kind, text] of [["norms", "squared norms"], ["factors", "clip factors"], ["sums", "clipped sums"]])
    legend.append(element("span", text, `kind ${kind}`), " ");
  const table = element("table"), head = element("tr");
  head.append(...["parameter", "used by", "per-sample gradients", "computed at"].map((text) => element("th", text)));
  table.append(head, ...parameters.map(([name, used, way]) => {
    const row = element("tr"), where = element("td");
    for (const prefix of ["squared_norms", "clipped_sum"]) {
      const item = places.get(`${prefix}_${name.replace(/\W+/g, "_")}`);
      if (item) where.append(Object.assign(element("a", prefix.split("_")[1]), { href: `#${item.id}`, onclick: (event) => {
        event.preventDefault();
        item.focus();
        item.scrollIntoView({ block: "center" });
      } }), " ");
    }
    row.append(element("td", name), element("td", used), element("td", way), where);
    return row;
  }));
  const steps = element("ol");
  steps.append(...passes.map((text) => element("li", text)));
  parts.push(element("h2", "Parameters"), legend, table, element("h2", "Passes"), steps, ...code.flat());
  $("private").replaceChildren(...parts);
}
function showPrivate(on) {
  if (on && !$("private").childElementCount) fillPrivate();
  $("private").hidden = !on;
  $("open-private").setAttribute("aria-expanded", on);
  $("open-private").textContent = on ? "graph" : "private program";
  state.private = on;
  writeLink();
}
$("open-private").hidden = !data.private;
$("open-private").onclick = () => showPrivate($("private").hidden);

// Keyboard
document.addEventListener("keydown", (event) => {
  const typing = event.target === $("search");
  const step = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 }[event.key];
  if (event.key === "Escape") {
    if (typing) $("search").blur();
    if (state.private) showPrivate(false);
    else if (state.node) pick(null);
    else if (state.search) search($("search").value = "");
  } else if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  else if (event.key === "/") $("search").focus();
  else if (step && data.scheduled) setEpoch(state.epoch + step);
  else return;
  event.preventDefault();
});
for (const [id, g] of boxes) {
  g.setAttribute("tabindex", "0");
  g.setAttribute("role", "button");
  g.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    pick(nodes.get(id));
    $("name").focus();
  });
  g.addEventListener("focus", () => {
    const area = canvas.getBoundingClientRect(), box = g.getBoundingClientRect();
    const hidden = box.bottom > area.bottom || box.top < area.top || box.right > area.right || box.left < area.left;
    if (g.matches(":focus-visible") && hidden) centreOn(nodes.get(id));
  });
}

// Deep links: #epoch=3&site=layer1.0.conv1&search=conv2. The address follows what is shown.
let reading = false;
function writeLink() {
  if (reading) return;
  const link = new URLSearchParams();
  if (data.scheduled) link.set("epoch", state.epoch);
  if (state.node) link.set(state.node.site === undefined ? "node" : "site", state.node.site ?? state.node.id);
  if (state.search) link.set("search", state.search);
  if (state.private) link.set("private", 1);
  history.replaceState(null, "", "#" + link);
}
function readLink() {
  reading = true;
  const link = new URLSearchParams(location.hash.slice(1));
  setEpoch(+(link.get("epoch") ?? state.epoch));
  search($("search").value = link.get("search") ?? "");
  const wanted = data.nodes.find((node) => (link.has("site") && node.site === link.get("site")) || node.id === link.get("node"));
  pick(wanted ?? null);
  if (wanted) centreOn(wanted);
  if (data.private) showPrivate(link.has("private"));
  reading = false;
}
$("heat").setAttribute("aria-label", `Policy of each of ${E} epochs over ${n} sites`);
$("epoch").max = E;
document.querySelector("footer").hidden = !data.scheduled;
start();
readLink();
drawStrip();
addEventListener("hashchange", readLink);
addEventListener("resize", () => { show(); drawStrip(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawStrip);
