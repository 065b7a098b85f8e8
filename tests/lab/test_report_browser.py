"""Reports in a real headless Chromium: what is shown, chosen and filtered, at two widths and in both colour schemes."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dpquant_compile.lab.report import write_report
from dpquant_compile.lab.results import RunResult
from tests.support.chromium import Page, browse, find_chromium
from tests.support.runs import SITES, changed, make_run

BINARY = find_chromium()
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(BINARY is None, reason="no chromium, chromium-browser or google-chrome on PATH"),
]
GRAPH = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="300" height="200" aria-label="Net: 3 of 4 sites">'
    "<style>text { fill: red }</style><text x='9' y='30'>stem</text></svg>"
)
WIDTHS = (1280, 420)


def many_runs() -> list[RunResult]:
    runs = []
    for recipe, seed in itertools.product(("cnn-digits", "cnn-gtsrb-small"), range(3)):
        run: dict[str, Any] = {"recipe": recipe, "seed": seed, "epochs": 12}
        runs.append(make_run(0.93 + 0.004 * seed, **run, budget=0.0))
        runs.append(make_run(0.72, 0.6 + 0.01 * seed, **run, budget=1.0))
        for budget in (0.5, 0.75, 0.9):
            base = 0.9 - 0.12 * budget + 0.006 * ((seed * 7) % 3)
            more = {**run, "budget": budget}
            runs += [
                make_run(base - 0.03, base - 0.1 - 0.01 * seed, **more, scheduler="static"),
                make_run(base - 0.02, base - 0.06, **more, scheduler="pls"),
                make_run(base - 0.02, base - 0.06, **more, estimator="paper"),
                make_run(base, base - 0.01, **more),
            ]
    return runs


RUNS = many_runs()


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder: Path = tmp_path_factory.mktemp("reports")
    one = make_run(0.87, 0.84, epochs=10)
    long = changed(one, sites=tuple(f"encoder.layer.{i}.attention.output.dense" for i in range(40)))
    return {
        "many": write_report(RUNS, folder / "many.html", graph=GRAPH, times=True).as_uri(),
        "one": write_report([one], folder / "one.html", graph=GRAPH, times=True).as_uri(),
        "long": write_report([long], folder / "long.html").as_uri(),
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
    browser.resize(1280, 900)
    yield browser
    assert browser.run("document.body.dataset.error") is None
    assert browser.problems == []
    assert {url.split(":")[0] for url in browser.requests} <= {"file", "data", "about"}


def shown(page: Page) -> str:
    return str(page.run("document.querySelector('#shown .key').textContent"))


def choose(page: Page, box: str, value: str) -> None:
    page.run(f"(() => {{ const b = document.getElementById('{box}'); b.value = '{value}';"
             "b.dispatchEvent(new Event('change')) })()")  # fmt: skip


def test_the_chosen_run_is_shown(page: Page, urls: dict[str, str]) -> None:
    page.open(urls["many"])
    assert "-dpquant-" in shown(page)
    other = next(run for run in RUNS if run.config.scheduler == "pls" and run.config.budget == 0.5)
    choose(page, "run", other.key)
    assert shown(page) == other.key
    assert page.run("location.hash") == f"#run={other.key}"
    sites = page.run("[...document.querySelectorAll('#shown .schedule tbody th')].map((th) => th.textContent)")
    assert sites == list(SITES)
    strip = page.run("document.querySelector('#shown .strip title').textContent")
    low = [str(row.epoch) for row in other.epochs if SITES[0] in row.policy]
    assert strip == f"{SITES[0]}: low precision in epochs {', '.join(low)}"


def test_a_link_opens_a_run(page: Page, urls: dict[str, str]) -> None:
    key = RUNS[-1].key
    page.open(urls["many"] + f"#run={key}")
    assert shown(page) == key
    assert page.run("document.getElementById('run').value") == key
    page.open(urls["many"] + "#run=%")  # no such run: the page as it is
    assert "-dpquant-" in shown(page)
    page.run("document.querySelector('#runs').closest('details').open = true")
    page.run(f"document.querySelector('#runs a[href=\"#run={RUNS[0].key}\"]').click()")
    page.wait(f"document.querySelector('#shown .key').textContent === '{RUNS[0].key}'")


def test_the_filter_leaves_one_recipe(page: Page, urls: dict[str, str]) -> None:
    page.open(urls["many"])
    rows = "[...document.querySelectorAll('#headline tbody tr')].filter((tr) => tr.checkVisibility()).length"
    charts = "[...document.querySelectorAll('#budget .chart')].filter((c) => c.checkVisibility()).length"
    before = page.run(rows), page.run(charts)
    choose(page, "recipe", "cnn-digits")
    assert (page.run(rows) * 2, page.run(charts) * 2) == before == (28, 4)
    choose(page, "recipe", "")
    assert (page.run(rows), page.run(charts)) == before


def test_boxes_and_details_by_keyboard(page: Page, urls: dict[str, str]) -> None:
    page.open(urls["many"])
    tabbable = page.run("[...document.querySelectorAll('select, summary, .scroll')].every((e) => e.tabIndex === 0)")
    assert tabbable is True
    page.run("document.querySelector('#shown details:last-of-type summary').focus()")
    page.press("Enter")
    assert page.run("document.querySelector('#shown details:last-of-type').open") is True
    assert "dpquant train cnn-" in page.run("document.querySelector('#shown details:last-of-type pre').textContent")


def test_every_chart_has_a_name_and_every_table_a_caption(page: Page, urls: dict[str, str]) -> None:
    for name in ("many", "one"):
        page.open(urls[name])
        named = "[...document.querySelectorAll('svg[role=img]')].every((s) => s.firstElementChild.tagName === 'title')"
        assert page.run(named) is True
        assert page.run("[...document.querySelectorAll('table')].every((t) => t.caption?.textContent)") is True
        assert page.run("document.querySelectorAll('svg.chart').length") >= 2


def test_one_run(page: Page, urls: dict[str, str]) -> None:
    page.open(urls["one"])
    figures = page.run("[...document.querySelectorAll('.figures dd:not(.hint)')].map((d) => d.textContent)")
    assert figures == ["87.00 %", "84.00 %", "10.000", "10.5 s"]
    marks = page.run("[...document.querySelectorAll('.chart')].map((c) => c.querySelectorAll('.mark').length)")
    assert marks == [20, 10]
    assert page.run("document.querySelectorAll('select').length") == 0
    image = "document.querySelector('#graph img')"
    assert page.run(f"{image}.alt") == "Net: 3 of 4 sites"
    page.wait(f"{image}.complete && {image}.naturalWidth === 300")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["many", "one", "long"])
def test_nothing_is_wider_than_the_window(page: Page, urls: dict[str, str], name: str, width: int) -> None:
    page.resize(width, 900)
    page.open(urls[name])
    page.run("for (const d of document.querySelectorAll('details')) d.open = true")
    assert page.run("document.documentElement.scrollWidth") <= width


OVERLAPS = """
[...document.querySelectorAll('svg.chart')].filter((c) => c.checkVisibility()).flatMap((chart) => {
  const frame = chart.getBoundingClientRect(), texts = [...chart.querySelectorAll('text')];
  const boxes = texts.map((t) => [t.textContent, t.getBoundingClientRect()]);
  const outside = (b) => b.left < frame.left - .5 || b.right > frame.right + .5 || b.bottom > frame.bottom + .5;
  const out = boxes.filter(([, b]) => outside(b));
  const hit = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom - 1 && b.top < a.bottom - 1;
  const pairs = boxes.flatMap(([t, a], i) =>
    boxes.slice(i + 1).filter(([, b]) => hit(a, b)).map(([u]) => `${t} / ${u}`));
  return [...out.map(([t]) => t), ...pairs];
})
"""


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["many", "one"])
def test_texts_of_charts_are_whole_and_apart(page: Page, urls: dict[str, str], name: str, width: int) -> None:
    page.resize(width, 900)
    page.open(urls[name])
    assert page.run(OVERLAPS) == []
    smallest = "Math.min(...[...document.querySelectorAll('.chart text')].map((t) => t.getBoundingClientRect().height))"
    assert page.run(smallest) >= 10


def luminance(page: Page, colour: str) -> float:
    """The relative luminance of a CSS colour, by WCAG."""
    parts = page.run(
        f"(() => {{ const e = document.createElement('i'); e.style.color = '{colour}'; document.body.append(e);"
        "const c = getComputedStyle(e).color; e.remove(); return c.match(/[0-9.]+/g).slice(0, 3).map(Number) })()"
    )
    linear = [c / 255 / 12.92 if c / 255 <= 0.04045 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in parts]
    return float(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_can_be_told_from_the_ground(page: Page, urls: dict[str, str], scheme: str) -> None:
    page.prefer(scheme)
    page.open(urls["one"])
    ground = luminance(page, "var(--ground)")
    assert (ground < 0.5) == (scheme == "dark")
    # 4.5 to 1 is WCAG's bound for text, 3 to 1 the one for drawings.
    for name, bound in {"--ink": 4.5, "--soft": 4.5, "--accent": 4.5, **{f"--s{i}": 3.0 for i in range(8)}}.items():
        low, high = sorted((ground, luminance(page, f"var({name})")))
        assert (high + 0.05) / (low + 0.05) >= bound, name
    low, high = sorted(luminance(page, f"var({name})") for name in ("--full", "--low"))
    assert (high + 0.05) / (low + 0.05) > 1.8


def test_the_drawing_does_not_colour_the_page(page: Page, urls: dict[str, str]) -> None:
    page.open(urls["one"])
    assert page.run("getComputedStyle(document.querySelector('.chart text')).fill") != "rgb(255, 0, 0)"
