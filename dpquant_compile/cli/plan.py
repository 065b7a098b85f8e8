"""`dpquant plan`: the noise for a privacy budget, or the cost of a given noise, before anything is trained."""

import argparse
import dataclasses
from typing import TYPE_CHECKING

from dpquant_compile.cli.command import DONE, Command, InputError

if TYPE_CHECKING:
    from dpquant_compile.cli.output import Output
    from dpquant_compile.privacy.accounting.planning import Plan

__all__ = ["COMMAND"]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    question = parser.add_mutually_exclusive_group(required=True)
    question.add_argument("--target-epsilon", type=float, metavar="ε", help="find the least noise that keeps this")
    question.add_argument("--noise-multiplier", type=float, metavar="σ", help="say what this noise costs")
    run = parser.add_argument_group("the run")
    run.add_argument("--dataset-size", type=int, required=True, metavar="N", help="samples of the training data")
    run.add_argument("--batch-size", type=int, required=True, metavar="B", help="expected size of a Poisson batch")
    run.add_argument("--epochs", type=int, required=True, metavar="E")
    run.add_argument("--delta", type=float, required=True, help="well below 1/N")
    run.add_argument("--accountant", choices=("prv", "rdp", "gdp"), default="prv", help="default: %(default)s")
    analyses = parser.add_argument_group("the scheduler's analyses")
    analyses.add_argument(
        "--estimator",
        choices=("per_sample", "paper", "none"),
        default="per_sample",
        help="default: %(default)s; none plans training alone",
    )
    analyses.add_argument("--n-interval", type=int, default=2, metavar="N", help="epochs between two; default: 2")
    analyses.add_argument("--n-sample", type=int, metavar="N", help="physical batches that each draws")
    analyses.add_argument("--sigma-measure", type=float, metavar="σ", help="their noise multiplier")
    analyses.add_argument("--physical", type=int, metavar="B", help="max_physical_batch_size; default: at most 128")
    analyses.add_argument("--analyses", type=int, metavar="N", help="how many, in the place of --n-interval")


def _run(args: argparse.Namespace, output: "Output") -> int:
    import dpquant_compile as dpq

    if 0 < args.dataset_size < args.batch_size:
        raise InputError(
            f"--batch-size {args.batch_size} is more than --dataset-size {args.dataset_size}: a batch is drawn from "
            "the dataset. Fix: give a batch size of at most the dataset's size"
        )
    made = dpq.plan(
        target_epsilon=args.target_epsilon,
        noise_multiplier=args.noise_multiplier,
        delta=args.delta,
        dataset_size=args.dataset_size,
        batch_size=args.batch_size,
        epochs=args.epochs,
        analyses=args.analyses,
        n_interval=args.n_interval,
        n_sample=args.n_sample,
        max_physical_batch_size=args.physical,
        sigma_measure=args.sigma_measure,
        estimator=None if args.estimator == "none" else args.estimator,
        accountant=args.accountant,
    )
    if args.delta * args.dataset_size >= 1:
        output.note(
            f"δ = {args.delta:g} is not below 1/N = {1 / args.dataset_size:g}: such a δ lets a mechanism publish a "
            "whole sample."
        )
    _show(made, output)
    return DONE


def _show(made: "Plan", output: "Output") -> None:
    from dpquant_compile.cli.output import table
    from dpquant_compile.lab.cells import show_number

    cells = [
        (name, str(steps), show_number(q, 6), show_number(sigma, 3), show_number(epsilon, 4))
        for name, steps, q, sigma, epsilon in made.spends
    ]
    together = show_number(made.epsilon, 4)
    cells.append(("together", "", "", "", together))
    if made.target_epsilon is None:
        answer = f"ε = {together}"
    else:
        answer = f"σ = {made.noise_multiplier:g} keeps ε = {made.target_epsilon:g}"
    title = f"{answer} at δ = {made.delta:g} ({made.accountant})"
    head = ("purpose", "steps", "q", "σ", "ε")
    output.result(dataclasses.asdict(made), table(head, cells, title=title, right=head[1:]))


COMMAND = Command(
    "plan",
    "find the noise for a privacy budget, or what a noise costs, analyses included",
    (
        "dpquant plan --target-epsilon 8 --delta 1e-5 --dataset-size 50000 --batch-size 1024 --epochs 60",
        "dpquant plan --noise-multiplier 1.1 --delta 1e-5 --dataset-size 50000 --batch-size 1024 --epochs 60 --json",
        "dpquant plan --target-epsilon 3 --delta 1e-4 --dataset-size 1437 --batch-size 256 --epochs 9 --estimator none",
    ),
    _add_arguments,
    _run,
)
