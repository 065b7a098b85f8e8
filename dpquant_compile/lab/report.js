// Behaviour of the report; see report.html. All numbers are in the page: this only chooses what is shown.
"use strict";
const $ = (id) => document.getElementById(id);
const templates = new Map([...document.querySelectorAll("template[data-run]")].map((t) => [t.dataset.run, t]));

function choose(key) {
  $("shown").replaceChildren(templates.get(key).content.cloneNode(true));
  $("run").value = key;
}

const link = (key) => "#run=" + encodeURIComponent(key);
function follow() {  // #run=KEY opens that run
  const key = [...templates.keys()].find((each) => link(each) === location.hash);
  if (key === undefined) return;
  choose(key);
  $("run-section").scrollIntoView();
}

if ($("run")) {
  $("run").addEventListener("change", () => {
    choose($("run").value);
    history.replaceState(null, "", link($("run").value));
  });
  addEventListener("hashchange", follow);
  follow();
}

if ($("task")) {
  const filter = () => {
    const wanted = $("task").value;
    for (const element of document.querySelectorAll("[data-task]"))
      element.hidden = wanted !== "" && element.dataset.task !== wanted;
  };
  $("task").addEventListener("change", filter);
  filter();  // a browser may restore the choice when the page is loaded again
}
