"""Reports: the numbers by hand, nothing mixed that differs, and a page that holds them all and nothing unsafe."""

import dataclasses
import itertools
import math
import random
import re
from pathlib import Path
from typing import Any

import pytest

from dpquant_compile.errors import LabError
from dpquant_compile.lab.cells import show_epsilon, show_number, show_percent
from dpquant_compile.lab.charts import ticks
from dpquant_compile.lab.config import RunConfig
from dpquant_compile.lab.report import markdown_table, summarise, write_report
from dpquant_compile.lab.run_page import command, run_section
from dpquant_compile.lab.tables import NOT_USED, Stat, compare, fronts, non_dominated, panels, series_name
from tests.support.runs import SITES, changed, make_run

# One other value for each field that must not be mixed.
OTHER: dict[str, Any] = {
    "task": "cnn-gtsrb-small",
    "recipe": "luq",
    "format": "uniform4",
    "high": "int8",
    "budget": 0.5,
    "scheduler": "pls",
    "estimator": "paper",
    "optimizer": "adam",
    "privacy": "none",
    "quantize_outputs": "all",
    "epochs": 3,
    "batch_size": 77,
    "physical": 11,
    "lr": 0.123,
    "lr_decay": "cosine",
    "noise_multiplier": 2.5,
    "target_epsilon": 3.5,
    "max_grad_norm": 0.7,
    "delta": 1e-7,
    "beta": 3.0,
    "ema": 0.4,
    "normalise": "rank",
    "n_interval": 3,
    "n_sample": 2,
    "sigma_measure": 1.5,
    "clip_measure": 0.3,
    "repetitions": 4,
    "reproducible": True,
}


def grid() -> list[Any]:
    """Three schedulers at two budgets over four seeds, and full precision."""
    runs = [make_run(0.9 + 0.01 * seed, budget=0.0, seed=seed) for seed in range(4)]
    for budget, seed in itertools.product((0.5, 0.75), range(4)):
        cost = 0.1 * budget
        runs += [
            make_run(0.8 + 0.01 * seed - cost, 0.7 + 0.02 * seed - cost, budget=budget, seed=seed, scheduler="static"),
            make_run(0.81 + 0.01 * seed - cost, 0.75 + 0.01 * seed, budget=budget, seed=seed, scheduler="pls"),
            make_run(0.84 + 0.01 * seed - cost, 0.8 + 0.01 * seed, budget=budget, seed=seed),
        ]
    return runs


def test_mean_and_sample_standard_deviation() -> None:
    stat = Stat.of([1.0, None, 2.0, math.nan, 6.0])
    assert (stat.n, stat.mean) == (3, 3.0)
    assert stat.std == pytest.approx(math.sqrt(7))
    assert stat.error == pytest.approx(math.sqrt(7 / 3))
    assert Stat.of([None, math.nan]).mean is None
    assert Stat.of([5.0]).std is None


def test_numbers_as_text() -> None:
    assert show_percent(Stat.of([0.5])) == "50.00"
    assert show_percent(Stat.of([0.5, 0.6])) == "55.00 ± 7.07"
    assert show_percent(Stat.of([0.5, None, 0.6]), of=3) == "55.00 ± 7.07 (2 of 3 runs)"
    assert show_percent(Stat.of([])) == "–"
    assert show_number(-0.5) == "−0.50"
    assert show_number(0.5, 1, signed=True) == "+0.5"
    assert show_epsilon(Stat.of([4.62601, 4.62602])) == "4.626"
    assert show_epsilon(Stat.of([4.6, 4.7])) == "4.600 to 4.700"
    assert show_epsilon(Stat.of([None])) == "–"


def test_every_field_is_known_here() -> None:
    known = {field.name for field in dataclasses.fields(RunConfig)}
    assert known == OTHER.keys() | {"seed", "static_seed", "data"}


@pytest.mark.parametrize("field", OTHER)
def test_runs_that_differ_in_a_field_are_not_mixed(field: str) -> None:
    more = {"scheduler": "pls"} if field == "privacy" else {}
    runs = [make_run(seed=seed, **{**more, **other}) for seed in (0, 1) for other in ({}, {field: OTHER[field]})]
    rows = summarise(runs)
    assert [row.n for row in rows] == [2, 2]
    usual = getattr(runs[0].config, field)
    assert {row.settings[field] for row in rows} == {NOT_USED if field in ("format", "high") else usual, OTHER[field]}
    assert field in markdown_table(rows)


def test_seeds_and_subsets_are_repetitions() -> None:
    pairs = itertools.product((0, 1), (5, 6, 7))
    rows = summarise([make_run(seed=seed, static_seed=subset, scheduler="static") for seed, subset in pairs])
    assert [(row.n, row.seeds) for row in rows] == [(6, 2)]
    assert "| 6 (2 seeds) |" in markdown_table(rows)


def test_fields_that_a_run_does_not_read_do_not_split_it() -> None:
    static = [make_run(seed=i, scheduler="static", estimator=name) for i, name in enumerate(("paper", "per_sample"))]
    assert [row.n for row in summarise(static)] == [2]
    full = [make_run(budget=0.0, format=name) for name in ("luq_fp4", "uniform4")]
    assert [row.n for row in summarise(full)] == [1]  # one run under two names


def test_all_sites_in_int8_are_not_full_precision() -> None:
    """With `high="int8"` a budget of 0 is int8 throughout: no baseline, and not called one."""
    int8 = make_run(budget=0.0, high="int8")
    runs = [make_run(0.9, budget=0.0), int8, make_run(), make_run(high="int8"), make_run(budget=1.0)]
    rows = summarise([*runs, make_run(budget=1.0, high="int8")])
    names = [series_name(row, rows) for row in rows if row.settings["scheduler"] == NOT_USED]
    assert sorted(names) == ["all sites", "all sites in int8", "full precision"]  # at budget 1 nothing reads `high`
    assert [[row.accuracy.mean for row in panel.baseline] for panel in panels(rows)] == [[0.9], [0.9]]
    assert "int8-high" in int8.key and "full" not in int8.key


def test_a_run_counts_once_and_must_have_one_result() -> None:
    run = make_run(0.8)
    assert [row.n for row in summarise([run, run])] == [1]
    with pytest.raises(LabError, match=rf"{re.escape(run.key)}: two results .* Fix:"):
        summarise([run, changed(run, accuracy=0.7)])


def test_no_runs(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="no finished run"):
        write_report([], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_difference_from_static_by_hand() -> None:
    static = [make_run(a, scheduler="static", seed=seed) for seed, a in enumerate((0.50, 0.54, 0.58))]
    ours = [make_run(a, low, seed=seed) for seed, a, low in ((1, 0.60, 0.54), (2, 0.62, 0.60), (9, 0.70, 0.70))]
    (found,) = compare(summarise([*static, *ours]))
    assert found.accuracy.mean == pytest.approx(0.64 - 0.54)
    assert found.accuracy.stds == pytest.approx(0.10 / 0.04)
    assert found.accuracy.paired.values == pytest.approx((0.06, 0.04))  # seeds 1 and 2
    assert found.accuracy.paired.error == pytest.approx(0.01)
    assert found.accuracy_low.paired.values == pytest.approx((0.0, 0.02))
    text = markdown_table([found])
    assert "| 3, 3 | +10.00 (+2.5 std) | +5.00 ± 1.00 (2 pairs) |" in text


def test_a_seed_with_several_subsets_is_paired_with_their_mean() -> None:
    static = [make_run(a, scheduler="static", seed=0, static_seed=i) for i, a in enumerate((0.50, 0.60))]
    (found,) = compare(summarise([*static, make_run(0.60, seed=0)]))
    assert found.accuracy.paired.values == pytest.approx((0.05,))
    assert "+5.00 (1 pair) |" in markdown_table([found])


def test_one_static_run_has_no_spread() -> None:
    (found,) = compare(summarise([make_run(0.5, scheduler="static"), make_run(0.6, seed=1)]))
    assert (found.accuracy.stds, found.accuracy.paired.values) == (None, ())
    assert "| 1, 1 | +10.00 | – |" in markdown_table([found])


@pytest.mark.parametrize("field", ["lr", "epochs", "format", "task", "optimizer", "target_epsilon", "budget"])
def test_only_like_is_compared_with_like(field: str) -> None:
    assert compare(summarise([make_run(scheduler="static"), make_run(**{field: OTHER[field]})])) == []


def test_settings_of_the_analysis_are_compared_with_the_same_static_runs() -> None:
    runs = [make_run(scheduler="static"), *(make_run(beta=beta) for beta in (1.0, 4.0))]
    found = compare(summarise(runs))
    assert [each.row.settings["beta"] for each in found] == [1.0, 4.0]


def test_non_dominated_against_the_definition() -> None:
    rng = random.Random(0)
    for _ in range(200):
        points = [(rng.randrange(5) / 4, rng.randrange(5) / 4) for _ in range(rng.randrange(9))]
        kept = non_dominated(points)
        for i, (x, y) in enumerate(points):
            beaten = any((a >= x and b >= y) and (a, b) != (x, y) for a, b in points)
            twin = any(j in kept and points[j] == (x, y) for j in range(len(points)) if j != i)
            assert (i in kept) == (not beaten and not twin)
        assert [points[i][0] for i in kept] == sorted(points[i][0] for i in kept)


def test_fronts_of_a_panel() -> None:
    (panel,) = panels(summarise([*grid(), make_run(0.6, 0.55, budget=1.0)]))
    assert [row.settings["budget"] for row in panel.baseline] == [0.0]
    found = fronts(panel, "accuracy")
    assert found["static"] == [(0.5, pytest.approx(0.765)), (0.75, pytest.approx(0.74)), (1.0, 0.6)]
    assert found["scheduled"] == [(0.5, pytest.approx(0.805)), (0.75, pytest.approx(0.78)), (1.0, 0.6)]
    assert found["best static"] == [(0.5, pytest.approx(0.78)), (0.75, pytest.approx(0.755)), (1.0, 0.6)]
    assert fronts(panel, "accuracy_low")["scheduled"] == [(0.75, pytest.approx(0.815)), (1.0, 0.55)]


def test_full_precision_is_the_baseline_of_every_format() -> None:
    runs = [make_run(budget=0.0), make_run(), make_run(format="uniform4"), make_run(lr=9.0)]
    assert [len(panel.baseline) for panel in panels(summarise(runs))] == [1, 1, 0]


def test_markdown() -> None:
    runs = [make_run(0.8, 0.7, seed=0), make_run(0.9, 0.7, seed=1), make_run(0.5, scheduler="pls", privacy="none")]
    assert markdown_table(summarise(runs), times=True) == (
        "In all rows: task cnn-digits, recipe int4, optimizer sgd.\n"
        "\n"
        "| privacy | budget | scheduler | estimator | runs | accuracy, full precision (%) "
        "| accuracy, low precision (%) | ε (δ = 1e-5) | seconds |\n"
        "|---|---|---|---|---:|---:|---:|---:|---:|\n"
        "| dp | 75 % | dpquant | per_sample | 2 | 85.00 ± 7.07 | 70.00 ± 0.00 | 4.000 | 10.5 |\n"
        "| none | 75 % | pls | – | 1 | 50.00 | 50.00 | – | 9.5 |\n"
    )


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-3.2, 17), (0.1234, 0.1239), (99.2, 100), (0, 4e6), (-1e-3, 0)])
def test_ticks_hold_the_range(low: float, high: float) -> None:
    found = ticks(low, high)
    assert found[0] <= low and found[-1] >= high
    assert 3 <= len(found) <= 8
    steps = [b - a for a, b in itertools.pairwise(found)]
    assert steps == pytest.approx([steps[0]] * len(steps))


def test_the_command_repeats_the_run() -> None:
    from dpquant_compile.cli.main import make_parser

    known = {field.name for field in dataclasses.fields(RunConfig)}
    for one_of in ("recipe", "format"):  # they contradict each other
        words = {name: value for name, value in OTHER.items() if name not in ("privacy", "scheduler", one_of)}
        config = RunConfig(**{**words, "seed": 5, "static_seed": 6})
        program, *rest = command(config).split()
        assert program == "dpquant"
        parsed = vars(make_parser().parse_args(rest))
        assert RunConfig(**{name: value for name, value in parsed.items() if name in known}) == config


SYSTEM = "came from the operating system's entropy"
SEEDS = "follow from the seeds, which this page shows. ε holds only as long as nobody knows the seeds"


def words_of(runs: list[Any], path: Path) -> str:
    """What a page says before its sections, as text."""
    page = write_report(runs, path).read_text(encoding="utf-8")
    return re.sub(r"<[^>]+>", " ", page.split("<header>")[1].split("</header>")[0])


@pytest.mark.parametrize("number", [1, 2])
def test_a_page_says_where_the_randomness_came_from(number: int, tmp_path: Path) -> None:
    fresh = [make_run(seed=seed) for seed in range(number)]
    known = [make_run(seed=seed, reproducible=True) for seed in range(number)]
    said = words_of(fresh, tmp_path / "a.html")
    assert SYSTEM in said and "seeds," not in said
    said = words_of(known, tmp_path / "b.html")
    assert SEEDS in said and "only where the data is public" in said and SYSTEM not in said
    control = make_run(privacy="none", budget=0.0, reproducible=True)
    said = words_of([control], tmp_path / "c.html")  # it makes no claim
    assert SEEDS not in said and SYSTEM not in said
    assert SEEDS not in words_of([*fresh, control], tmp_path / "d.html")


@pytest.mark.parametrize("number", [1, 2])
def test_a_page_says_whom_its_epsilon_protects(number: int, tmp_path: Path) -> None:
    said = words_of([make_run(seed=seed) for seed in range(number)], tmp_path / "a.html")
    assert said.count("Unit of privacy: one sample of the dataset.") == 1
    assert said.count("neighbours if one is the other with one sample of the dataset added or removed") == 1
    assert "Unit of privacy" not in words_of([make_run(privacy="none", budget=0.0)], tmp_path / "b.html")


@pytest.mark.parametrize("task", ["cnn-digits", "cnn-gtsrb-small"])
def test_a_page_of_both_kinds_says_which_is_which(task: str, tmp_path: Path) -> None:
    runs = [make_run(), make_run(seed=1), make_run(task=task, reproducible=True)]
    said = words_of(runs, tmp_path / "report.html")
    assert "1 of 3 private runs are reproducible, as the column of that name says" in said
    assert SEEDS in said and SYSTEM in said
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    headline = page.split('id="headline"')[1].split("</table>")[0]
    assert ">reproducible</th>" in headline and "<td>yes</td>" in headline and "<td>no</td>" in headline
    by_run = dict(re.findall(r'<template data-run="([^"]+)">(.*?)</template>', page, re.DOTALL))
    for run in runs:
        assert ("as long as nobody knows the seed" in by_run[run.key]) is run.config.reproducible
        assert ("repeats this run" in by_run[run.key]) is run.config.reproducible
        assert ("train" in by_run[run.key] and "--reproducible" in by_run[run.key]) is run.config.reproducible


def test_page_of_many_runs_holds_the_tables(tmp_path: Path) -> None:
    path = write_report(grid(), tmp_path / "new" / "report.html", title="A & B")
    page = path.read_text(encoding="utf-8")
    assert "<title>A &amp; B</title>" in page
    for number in ("91.50 ± 1.29", "76.50 ± 1.29", "+4.00 (+3.1 std)", "+4.00 ± 0.00 (4 pairs)", "80.50 ± 1.29"):
        assert number in page
    assert page.count("<template data-run=") == len(grid())
    assert not re.search(r"""(src|href)=(?!["'](data:|#))""", page)


def test_hostile_names_are_text(tmp_path: Path) -> None:
    evil = """</script><script>alert('x')</script>{{css}}&"'"""
    runs = []
    for seed in (0, 1):
        run = make_run(seed=seed)
        rows = tuple(dataclasses.replace(row, policy=(evil,)) for row in run.epochs)
        config = dataclasses.replace(run.config, task=evil)
        runs.append(
            changed(
                run,
                key=f"{evil}{seed}",
                config=config,
                sites=(evil,),
                epochs=rows,
                scores={evil: 1.0},
                probabilities={evil: 1.0},
                epsilons={evil: 1.0, "training": 2.0},
                seconds={evil: 1.0},
                versions={evil: evil},
            )
        )
    plain = write_report([make_run(seed=seed) for seed in (0, 1)], tmp_path / "a.html").read_text(encoding="utf-8")
    page = write_report(runs, tmp_path / "b.html", title=evil).read_text(encoding="utf-8")
    assert page.count("<script") == plain.count("<script")
    assert "alert(&#x27;x&#x27;)" in page and "alert('" not in page
    assert page.count(":root {") == plain.count(":root {")  # {{css}} in a name is no slot


def test_missing_and_strange_numbers(tmp_path: Path) -> None:
    odd = changed(make_run(), accuracy=math.nan, epsilon=math.inf, probabilities={"fc": math.nan}, seconds={})
    bare = changed(make_run(seed=1), epochs=(), scores={}, probabilities={}, epsilons={})
    for name, runs in {"one": [odd], "other": [bare], "both": [odd, bare]}.items():
        assert "accuracy" in write_report(runs, tmp_path / f"{name}.html").read_text(encoding="utf-8")


# Wall times of private runs depend on the data, and ε does not cover them.


def timed(**settings: Any) -> Any:
    """A run whose times are numbers that nothing else on a page is."""
    run = make_run(**settings)
    rows = tuple(dataclasses.replace(row, seconds=7001.1 + i) for i, row in enumerate(run.epochs))
    return changed(run, epochs=rows, seconds={"training": 6001.1, "analysis": 511.2, "compiling": 47.3})


TIMES = ("7001.1", "6001.1", "511.2", "47.3", "6559.6")  # of an epoch, of stages, in all
PAGES = {"one": [{}], "many": [{"seed": 0}, {"seed": 1}, {"scheduler": "static"}, {"privacy": "none", "budget": 0.0}]}


@pytest.mark.parametrize("name", PAGES)
def test_a_report_shows_no_times(name: str, tmp_path: Path) -> None:
    runs = [timed(**settings) for settings in PAGES[name]]
    page = write_report(runs, tmp_path / "report.html").read_text(encoding="utf-8")
    tables = markdown_table(summarise(runs))
    for text in (page, tables):
        assert [number for number in TIMES if number in text] == []
        assert not re.search(r"\bseconds\b|\btime\b", text, re.IGNORECASE)


@pytest.mark.parametrize("name", PAGES)
def test_times_that_are_asked_for_come_with_a_warning(name: str, tmp_path: Path) -> None:
    runs = [timed(**settings) for settings in PAGES[name]]
    page = write_report(runs, tmp_path / "report.html", times=True).read_text(encoding="utf-8")
    assert [number for number in TIMES if number not in page] == []
    assert "Times depend on the data that was drawn and are not covered by ε" in page and "data is public" in page
    assert "| 6559.6 |" in markdown_table(summarise(runs), times=True)


def test_times_of_controls_need_no_warning(tmp_path: Path) -> None:
    page = write_report([timed(privacy="none", budget=0.0)], tmp_path / "report.html", times=True)
    assert "6559.6 s" in page.read_text(encoding="utf-8") and "not covered" not in page.read_text(encoding="utf-8")


def test_one_run_without_privacy(tmp_path: Path) -> None:
    run = make_run(0.75, privacy="none", budget=0.0)
    page = write_report([run], tmp_path / "report.html").read_text(encoding="utf-8")
    assert "not private: a control" in page
    assert "ε by epoch" not in page
    assert "Every site ran in full precision" in page
    assert all(site not in page for site in SITES[1:3])


@pytest.mark.parametrize(
    ("high", "others", "beside"),
    [
        ("float32", "full precision", ""),
        ("bfloat16", "bfloat16", " and the others in bfloat16"),
        ("int8", "int8", " and the others in int8"),
    ],
)
def test_a_run_says_its_operands_and_what_the_other_sites_ran_in(high: str, others: str, beside: str) -> None:
    text = run_section(make_run(0.75, recipe="luq", high=high, format=None))
    assert "low precision (luq: input int4.nearest; weight int4.nearest; output gradient luq_fp4)" in text
    assert f"</svg>{others}</li>" in text and f"sites in luq{beside}, as in the last epoch" in text
    assert f"Every site ran in {others} in" in run_section(make_run(0.75, budget=0.0, recipe="luq", high=high))


@pytest.mark.parametrize(
    ("settings", "fc"),
    [({}, ("0.100", "0.25")), ({"scheduler": "pls"}, ("0.250", "–")), ({"scheduler": "static"}, ("–", "–"))],
    ids=["dpquant", "pls", "static"],
)
def test_chances_and_scores_only_where_there_are_any(
    settings: dict[str, Any], fc: tuple[str, str], tmp_path: Path
) -> None:
    page = write_report([make_run(**settings)], tmp_path / "report.html").read_text(encoding="utf-8")
    row = re.search(r'<th scope="row">fc</th>(.*?)</tr>', page)
    assert row is not None
    cells = re.findall(r'<td class="number">([^<]*)', row[1])
    assert cells == ["3", *fc]


@pytest.mark.parametrize("graph", ["", "<p>no", "<p>text</p>"])
def test_a_graph_that_is_none(graph: str, tmp_path: Path) -> None:
    with pytest.raises(LabError, match=r"graph: .*Fix: give what graph_view\(\).to_svg\(\) returns"):
        write_report([make_run()], tmp_path / "report.html", graph=graph)
