"""The page in a real headless Chromium: colours, panel, search, zoom, keys, deep links, no network, no errors."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import fx, nn

from dpquant_compile.numerics.recipe import Recipe
from dpquant_compile.policy import Policy, draw_policy
from dpquant_compile.sites import ConvGeometry, Site, SiteTable
from dpquant_compile.view import GraphView
from tests.support.chromium import Page, browse, find_chromium

BINARY = find_chromium()
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(BINARY is None, reason="no chromium, chromium-browser or google-chrome on PATH"),
]
EPOCHS = 12


class Block(nn.Module):
    def __init__(self, before: int, width: int) -> None:
        super().__init__()
        stride = 1 if before == width else 2
        self.conv1 = nn.Conv2d(before, width, 3, stride, 1)
        self.bn1 = nn.GroupNorm(1, width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1)
        self.bn2 = nn.GroupNorm(1, width)
        self.relu = nn.ReLU()
        self.downsample = nn.Conv2d(before, width, 1, stride) if stride == 2 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + self.downsample(x))


class ResNet(nn.Module):
    """As deep as ResNet18, and narrow."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 2, 7, 2, 3)
        self.layer1 = nn.Sequential(Block(2, 2), Block(2, 2))
        self.layer2 = nn.Sequential(Block(2, 4), Block(4, 4))
        self.layer3 = nn.Sequential(Block(4, 8), Block(8, 8))
        self.layer4 = nn.Sequential(Block(8, 16), Block(16, 16))
        self.fc = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer4(self.layer3(self.layer2(self.layer1(self.conv1(x)))))
        return self.fc(x.mean((2, 3)))


def resnet_view() -> GraphView:
    gm = fx.symbolic_trace(ResNet())
    sites: list[Site] = []
    for node in gm.graph.nodes:
        module = gm.get_submodule(node.target) if node.op == "call_module" else None
        if isinstance(module, nn.Conv2d | nn.Linear):
            conv = isinstance(module, nn.Conv2d)
            site = Site(
                node.target,
                "conv2d" if conv else "linear",
                len(sites),
                weight_shape=tuple(module.weight.shape),
                geometry=ConvGeometry((1, 1), (1, 1), (1, 1)) if conv else None,
                input_shape=(8, 2, 16, 16),
                output_shape=(8, 2, 8, 8),
                flops=1_234_000,
                source=f"resnet.py:{10 + len(sites)}: x = self.layer(x)",
            )
            sites.append(site)
            node.meta |= {"site": site, "origin": "canonicalize"}
    table = SiteTable(tuple(sites))
    kernels = dict.fromkeys(table.names, "reference (emulated)")
    return GraphView.build(gm, table, Policy((), table.names), kernels, "ResNet <18>", Recipe.of_format("luq_fp4"))


VIEW = resnet_view()
SCHEDULE = [draw_policy(epoch + 3, VIEW.sites.names, epoch) for epoch in range(EPOCHS)]


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder: Path = tmp_path_factory.mktemp("pages")
    return {
        "scheduled": VIEW.save_html(folder / "scheduled.html", SCHEDULE).as_uri(),
        "plain": VIEW.with_policy(["fc"]).save_html(folder / "plain.html").as_uri(),
    }


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    assert BINARY is not None
    with browse(BINARY) as page:
        yield page


@pytest.fixture
def page(browser: Page) -> Iterator[Page]:
    """The tab; after each test it must have asked for nothing but the page, and met no error."""
    browser.requests.clear()
    browser.problems.clear()
    browser.prefer("light")
    yield browser
    assert browser.run("document.body.dataset.error") is None
    assert browser.problems == []
    assert {url.split(":")[0] for url in browser.requests} <= {"file", "data", "about"}


def low_sites(page: Page) -> set[str]:
    ids = set(page.run("[...document.querySelectorAll('#graph .site.low')].map((g) => g.dataset.id)"))
    return {node.site for node in VIEW.nodes if node.id in ids and node.site is not None}


def fact(page: Page, term: str) -> str | None:
    value: str | None = page.run(f"document.querySelector('[data-fact=\"{term}\"]')?.textContent")
    return value


def box_colour(page: Page, node: str) -> str:
    return str(page.run(f"getComputedStyle(document.querySelector('#graph [data-id={node}] .box')).fill"))


def scale(page: Page) -> float:
    return float(page.run("document.getElementById('view').getCTM().a"))


def test_link_to_an_epoch_and_a_site(page: Page, urls: dict[str, str]) -> None:
    page.open(urls["scheduled"] + "#epoch=3&site=layer1.0.conv1")
    assert low_sites(page) == SCHEDULE[2]
    status = page.run("document.getElementById('status').textContent")
    assert status == f"epoch 3 of {EPOCHS}, policy {SCHEDULE[2]}, 5 of 21 sites in luq_fp4"
    assert page.run("document.querySelector('h1').textContent") == "ResNet <18>"
    assert page.run("document.getElementById('name').textContent") == "layer1.0.conv1"
    x, y = page.centre_of("#graph .picked")
    assert 124 < x < 1400 - 340
    assert 50 < y < 750


def test_slider_keys_and_colours(page: Page, urls: dict[str, str]) -> None:
    page.open(urls["scheduled"])
    assert low_sites(page) == SCHEDULE[0]
    page.press("ArrowRight")
    page.press("ArrowRight")
    page.press("ArrowLeft")
    assert low_sites(page) == SCHEDULE[1]
    assert "epoch=2" in page.run("location.hash")
    assert page.run("document.getElementById('epoch').getAttribute('aria-valuetext')").startswith("epoch 2 of 12")
    low = next(node.id for node in VIEW.nodes if node.site in SCHEDULE[1])
    full = next(node.id for node in VIEW.nodes if node.site and node.site not in SCHEDULE[1])
    assert (box_colour(page, low), box_colour(page, full)) == ("rgb(255, 169, 77)", "rgb(219, 229, 239)")
    badge = "getComputedStyle(document.querySelector('#graph [data-id={}] .badge')).display"
    assert (page.run(badge.format(low)), page.run(badge.format(full))) == ("inline", "none")


def test_play_runs_to_the_end(page: Page, urls: dict[str, str]) -> None:
    page.open(urls["scheduled"] + f"#epoch={EPOCHS - 1}")
    page.click("#play")
    assert page.run("document.getElementById('play').getAttribute('aria-label')") == "Pause"
    page.wait(f"document.getElementById('epoch').value === '{EPOCHS}'", 5)
    page.wait("document.getElementById('play').getAttribute('aria-label') !== 'Pause'", 5)
    assert low_sites(page) == SCHEDULE[-1]


def test_heat_strip_is_drawn_and_chooses_the_epoch(page: Page, urls: dict[str, str]) -> None:
    page.open(urls["scheduled"])
    left, right, y, height = page.run(
        "(() => { const b = document.getElementById('heat').getBoundingClientRect();"
        "return [b.left, b.right, b.top + 2, b.height] })()"
    )
    assert height > 50
    spot = (left + (right - left) * 4.5 / EPOCHS, y)
    page.drag(spot, spot)
    assert low_sites(page) == SCHEDULE[4]
    red = page.run(
        "(() => { const c = document.getElementById('heat'), p = c.getContext('2d');"
        f"const column = p.getImageData(c.width * 4.5 / {EPOCHS}, 0, 1, c.height).data;"
        "return data.sites.map((_, s) => column[4 * Math.floor(c.height * (s + .4) / data.sites.length)]) })()"
    )
    assert tuple(value > 230 for value in red) == SCHEDULE[4].mask


def test_click_opens_the_panel_and_escape_closes_it(page: Page, urls: dict[str, str]) -> None:
    page.open(urls["scheduled"])
    page.click("#graph [data-id=layer1_0_conv1]")
    assert page.run("document.getElementById('name').textContent") == "layer1.0.conv1"
    precision = "low (FP4)" if "layer1.0.conv1" in SCHEDULE[0] else "full precision"
    expected = {
        "op": "conv2d (s1x1 p1x1)",
        "weight shape": "2 × 2 × 3 × 3",
        "input shape": "8 × 2 × 16 × 16",
        "output shape": "8 × 2 × 8 × 8",
        "FLOPs": "1.234 MFLOP per sample, forward",
        "precision": precision,
        "kernel": "reference (emulated)",
        "origin pass": "canonicalize",
        "source line": "resnet.py:11: x = self.layer(x)",
    }
    assert {term: fact(page, term) for term in expected} == expected
    page.press("Escape")
    assert page.run("document.getElementById('panel').hidden") is True
    page.click("#graph [data-id=layer1_0_bn1]")
    assert (fact(page, "op"), fact(page, "kernel")) == ("GroupNorm", None)
    page.click("#close")
    assert page.run("document.getElementById('panel').hidden") is True


def test_panel_follows_the_epoch(page: Page, urls: dict[str, str]) -> None:
    site = next(s for s in VIEW.sites.names if s not in SCHEDULE[0] and s in SCHEDULE[1])
    page.open(urls["scheduled"] + f"#site={site}")
    assert fact(page, "precision") == "full precision"
    page.press("ArrowRight")
    assert fact(page, "precision") == "low (FP4)"


def test_search_highlights_and_centres(page: Page, urls: dict[str, str]) -> None:
    page.open(urls["scheduled"])
    page.press("/")
    page.type("layer4.1.conv2")
    hits = page.run("[...document.querySelectorAll('#graph .hit')].map((g) => g.dataset.id)")
    assert hits == ["layer4_1_conv2"]
    assert page.run("document.getElementById('found').textContent") == "1 of 1"
    x, y = page.centre_of("#graph .hit")
    assert 300 < x < 1100
    assert 200 < y < 600
    dimmed = "getComputedStyle(document.querySelector('#graph [data-id=layer4_1_conv1]')).opacity"
    assert float(page.run(dimmed)) < 0.5
    page.press("Enter")
    assert page.run("document.getElementById('name').textContent") == "layer4.1.conv2"
    page.press("Escape")
    page.press("Escape")
    assert page.run("document.querySelectorAll('#graph .hit').length") == 0


def test_search_by_link(page: Page, urls: dict[str, str]) -> None:
    page.open(urls["plain"] + "#search=downsample")
    assert page.run("document.querySelectorAll('#graph .hit.site').length") == 3
    page.open(urls["plain"] + "#search=nothing-like-this")
    assert page.run("document.getElementById('found').textContent") == "no match"


def test_wheel_drag_and_buttons_move_the_view(page: Page, urls: dict[str, str]) -> None:
    page.open(urls["scheduled"])
    before, spot = scale(page), page.centre_of("#graph [data-id=layer1_0_conv1]")
    page.mouse("mouseWheel", *spot, deltaX=0, deltaY=-240)
    page.wait(f"document.getElementById('view').getCTM().a > {before * 1.2}")
    assert page.centre_of("#graph [data-id=layer1_0_conv1]") == pytest.approx(spot, abs=2)
    page.drag((300, 400), (360, 450))
    moved = page.centre_of("#graph [data-id=layer1_0_conv1]")
    assert moved == pytest.approx((spot[0] + 60, spot[1] + 50), abs=2)
    assert page.run("document.getElementById('panel').hidden") is True
    page.click("#fit")
    _, top = page.centre_of("#graph [data-id=x]")
    _, bottom = page.centre_of("#graph [data-id=output]")
    assert 48 < top < bottom < 800
    fitted = scale(page)
    page.click("#in")
    assert scale(page) == pytest.approx(fitted * 1.3)
    page.click("#out")
    assert scale(page) == pytest.approx(fitted)
    page.click("#map")
    assert page.run("document.getElementById('lens').getAttribute('height')") is not None


def test_nodes_can_be_reached_by_keyboard(page: Page, urls: dict[str, str]) -> None:
    page.open(urls["plain"])
    page.run("document.querySelector('#graph [data-id=fc]').focus()")
    assert page.run("document.activeElement.getAttribute('aria-label')") == "fc, linear, low precision FP4"
    page.press("Enter")
    assert page.run("document.activeElement.id") == "name"
    page.press("Escape")
    assert page.run("document.activeElement.dataset.id") == "fc"


def test_without_a_schedule_there_is_no_slider(page: Page, urls: dict[str, str]) -> None:
    page.open(urls["plain"])
    assert low_sites(page) == {"fc"}
    assert page.run("document.getElementById('epoch').checkVisibility()") is False
    assert page.run("document.getElementById('status').textContent") == "policy 1of21:100000, 1 of 21 sites in luq_fp4"


def test_dark_scheme_and_screenshot(page: Page, urls: dict[str, str]) -> None:
    page.open(urls["scheduled"] + "#epoch=2")
    light = page.screenshot()
    page.prefer("dark")
    assert page.run("getComputedStyle(document.body).backgroundColor") == "rgb(17, 22, 28)"
    dark = page.screenshot()
    assert light[:8] == dark[:8] == b"\x89PNG\r\n\x1a\n"
    assert light != dark


def test_the_checks_would_see_a_request_and_an_error(browser: Page, urls: dict[str, str]) -> None:
    browser.open(urls["plain"])
    browser.problems.clear()
    browser.run("void fetch('http://127.0.0.1:9/').catch(() => 0)")
    browser.run("void setTimeout(() => { throw new Error('on purpose') })")
    browser.wait("document.body.dataset.error !== undefined")
    assert "on purpose" in browser.run("document.body.dataset.error")
    assert any("Content Security Policy" in problem for problem in browser.problems)
    assert any("on purpose" in problem for problem in browser.problems)
