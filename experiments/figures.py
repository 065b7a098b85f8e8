"""The figures of docs/evidence.md, from the tables in experiments/results.

python experiments/figures.py --results experiments/results --out docs/assets
"""

import argparse
import csv
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

SERIES = {
    "static": ("static subsets", "#888888", "o"),
    "pls": ("uniform draws", "#4c78a8", "s"),
    "dpquant paper": ("DPQuant, published estimator", "#e45756", "^"),
    "dpquant per_sample": ("DPQuant, per-sample estimator", "#2a9d5c", "D"),
    "dpquant per_sample, every epoch": ("DPQuant, per-sample, after every epoch", "#114b2d", "v"),
}


def read_runs(path: Path) -> list[dict[str, str]]:
    """The runs of a sweep, a row each."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def grouped(rows: list[dict[str, str]], column: str) -> dict[str, dict[float, list[float]]]:
    """Per cent of right answers by series and budget."""
    found: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        budget, scheduler = float(row["budget"]), row["scheduler"]
        name = f"{scheduler} {row['estimator']}" if scheduler == "dpquant" else scheduler
        if scheduler == "dpquant" and row["n_interval"] == "1":
            name += ", every epoch"
        if 0 < budget < 1:
            found[name][budget].append(100 * float(row[column]))
        else:
            found["full" if budget == 0 else "all"][budget].append(100 * float(row[column]))
    return found


def schedules(results: Path, names: dict[str, str], out: Path) -> None:
    """Accuracy against the share of sites in low precision: one panel for each data set and evaluation."""
    figure = Figure(figsize=(4.2 * len(names), 6.4), layout="constrained")
    panels = figure.subplots(2, len(names), squeeze=False)
    for column, (file, title) in enumerate(names.items()):
        rows = read_runs(results / f"{file}.csv")
        for line, (field, words) in enumerate((("accuracy", "full precision"), ("accuracy_low", "low precision"))):
            axes, found = panels[line][column], grouped(rows, field)
            for shift, (name, (label, colour, marker)) in enumerate(SERIES.items()):
                if name not in found:
                    continue
                budgets = sorted(found[name])
                means = [statistics.fmean(found[name][b]) for b in budgets]
                spread = [statistics.stdev(found[name][b]) for b in budgets]
                places = [100 * b + 0.8 * (shift - 1.5) for b in budgets]
                axes.errorbar(places, means, spread, color=colour, marker=marker, capsize=3, label=label)
            for name, budget in (("full", 0.0), ("all", 1.0)):
                if found.get(name):
                    level = statistics.fmean(found[name][budget])
                    axes.axhline(level, color="#bbbbbb", linestyle=":" if name == "full" else "--", linewidth=1)
                    text, place = ("no site" if name == "full" else "all sites"), ("axes fraction", "data")
                    axes.annotate(text, (0.01, level), xycoords=place, fontsize=7, va="bottom")
            axes.set(title=f"{title}, evaluated in {words}", xlabel="sites in FP4 (%)", ylabel="test accuracy (%)")
            axes.title.set_fontsize(9)
    drawn = [axes.get_legend_handles_labels() for axes in panels.flat]
    signs = {label: sign for signs, labels in drawn for sign, label in zip(signs, labels, strict=True)}
    panels[0][0].legend(list(signs.values()), list(signs), fontsize=7)
    figure.savefig(out)


def ranks(results: Path, names: dict[str, str], out: Path) -> None:
    """How well single measurements rank the sites."""
    tables: dict[str, Any] = {
        title: json.loads((results / f"{file}.json").read_text(encoding="utf-8")) for file, title in names.items()
    }
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(tables)
    for number, (title, table) in enumerate(tables.items()):
        rows = table["rows"]
        places = [i + number * width for i in range(len(rows))]
        axes.barh(places, [r["mean"] for r in rows], width, xerr=[r["std"] for r in rows], capsize=2, label=title)
        if number == 0:
            labels = [f"{r['estimator']} (ε {r['epsilon']:.2f})" if r["epsilon"] else r["estimator"] for r in rows]
            axes.set_yticks([i + 0.4 - width / 2 for i in range(len(rows))], labels, fontsize=7)
    axes.invert_yaxis()
    axes.set(xlabel="rank correlation of one measurement with the oracle", xlim=(-0.4, 1))
    axes.legend(fontsize=7)
    figure.savefig(out)


def main() -> None:
    """Draw all figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--results", type=Path, default=Path("experiments/results"))
    parser.add_argument("--out", type=Path, default=Path("docs/assets"))
    args = parser.parse_args()
    matplotlib.rcParams["svg.hashsalt"] = "dpquant"  # the same file for the same numbers
    args.out.mkdir(parents=True, exist_ok=True)
    sets = {
        "schedules_digits": "digits",
        "schedules_gtsrb": "traffic signs",
        "schedules_gtsrb_medium": "traffic signs, wider",
        "schedules_cifar10": "CIFAR-10",
    }
    tuned = {
        "schedules_gtsrb_tuned": "traffic signs, ResNet18 from pretrained weights",
        "schedules_cifar10_tuned": "CIFAR-10, the same",
    }
    for name, panels in (("schedules", sets), ("tuned", tuned)):
        there = {file: title for file, title in panels.items() if (args.results / f"{file}.csv").exists()}
        if there:
            schedules(args.results, there, args.out / f"evidence_{name}.svg")
    measured = {"estimator_ranks_digits": "digits", "estimator_ranks_gtsrb": "traffic signs"}
    found = {file: title for file, title in measured.items() if (args.results / f"{file}.json").exists()}
    ranks(args.results, found, args.out / "evidence_ranks.svg")


if __name__ == "__main__":
    main()
