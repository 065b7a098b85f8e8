"""Train a small CNN privately on handwritten digits, three quarters of its layers in four bits, and look at it.

    python examples/demo.py [--epochs 12] [--out out/demo] [--reproducible]

The data are the 1,797 digits that come with scikit-learn. Training is DP-SGD: Poisson batches, per-sample clipping,
Gaussian noise. Every second epoch a private analysis measures which layers bear low precision badly, and the scheduler
avoids those. It is what `dpquant train cnn-digits` and `dpquant report` do; examples/plain_loop.py has the whole loop.
The same network in full precision follows, for comparison. Noise and batches are new in every run, so results differ
by a few points; with --reproducible they follow from the seed, and ε would hold only as long as nobody knew that.
Writes report.html (begin there), graph.html, graph.svg, accuracy.png, schedule.png, privacy.png and the run's folder.
"""

import argparse
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dpquant_compile.lab.config import RunConfig
from dpquant_compile.lab.report import write_report
from dpquant_compile.lab.results import EpochRow
from dpquant_compile.lab.train import Run, train

HEADING = f"{'epoch':>5}  {'sites in four bits':<44}  {'epsilon':>7}  {'accuracy':>8}  {'in low':>6}  {'seconds':>7}"


def line(row: EpochRow, sites: Sequence[str]) -> str:
    """A row of the table; sites in full precision are what is worth naming, since they are few."""
    kept = ", ".join(name for name in sites if name not in row.policy)
    which = f"{len(row.policy)} of {len(sites)}, not {kept}"
    numbers = f"{row.epsilon:>7.2f}  {row.accuracy:>8.1%}  {row.accuracy_low:>6.1%}  {row.seconds:>7.1f}"
    return f"{row.epoch:>5}  {which:<44}  {numbers}"


def plot(rows: Sequence[EpochRow], path: Path) -> None:
    """Test accuracy by epoch."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    epochs = [row.epoch for row in rows]
    axes.plot(epochs, [100 * row.accuracy for row in rows], marker="o", label="evaluated in full precision")
    axes.plot(epochs, [100 * row.accuracy_low for row in rows], marker="s", label="evaluated in four bits")
    axes.axhline(10, color="grey", linestyle=":", label="chance")
    axes.set(xlabel="epoch", ylabel="test accuracy (%)", ylim=(0, 101))
    axes.set_title(f"Digits, 3/4 of the sites in four bits, ε = {rows[-1].epsilon:.1f}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Train, print the table, write the files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=12, help="passes over the training data (default: 12)")
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="folder for the files (default: out/demo)")
    parser.add_argument("--reproducible", action="store_true", help="the same noise and batches in every run")
    args = parser.parse_args()
    if args.epochs < 1:
        parser.error("--epochs must be at least 1")
    for name in ("run", "full_precision"):
        shutil.rmtree(args.out / name, ignore_errors=True)  # a demo begins anew; `dpquant train` would go on
    args.out.mkdir(parents=True, exist_ok=True)

    started = time.perf_counter()
    config = RunConfig("cnn-digits", budget=0.75, epochs=args.epochs, reproducible=args.reproducible).resolved()
    run = Run(config, args.out / "run")
    sites = run.model.sites.names
    print(f"\nFor the first epoch: {run.model.explain()}")
    print(f"\n{HEADING}\n{'':>5}  compiling…", flush=True)
    for row in run.epochs():
        print(line(row, sites), flush=True)
    result = run.finish()

    plot(result.epochs, args.out / "accuracy.png")
    history = run.scheduler.history
    history.heat_map(args.out / "schedule.png")
    history.privacy_plot(args.out / "privacy.png", result.delta)
    run.model.draw(args.out / "graph.svg")
    run.model.save_html(args.out / "graph.html", schedule=result.schedule)
    graph = run.model.graph_view().to_svg()
    print("\nThe same in full precision, for comparison…", flush=True)
    baseline = train(replace(config, budget=0.0), args.out / "full_precision")
    title = "Digits: private training with three quarters of the sites in four bits, and in float32"
    write_report([result, baseline], args.out / "report.html", title=title, graph=graph, times=True)  # public data
    print(f"\n{run.engine.ledger.statement(result.delta)}")
    spent = ", ".join(f"{purpose} {epsilon:.2f}" for purpose, epsilon in result.epsilons.items())
    print(f"\nepsilon {result.epsilon:.2f} at delta {result.delta:g}, one image more or less. By itself: {spent}")
    print(
        f"Test accuracy, trained with 3/4 of the sites in four bits: {result.accuracy:.1%} evaluated in full precision,"
    )
    print(f"{result.accuracy_low:.1%} evaluated in four bits. Trained in float32: {baseline.accuracy:.1%}. Chance: 10%")
    print(f"Took {time.perf_counter() - started:.0f} s. Now open {args.out / 'report.html'} in a browser")


if __name__ == "__main__":
    main()
