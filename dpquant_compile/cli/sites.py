"""`dpquant sites`: the layers of a model that can be switched to low precision."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpquant_compile.cli.command import DONE, Command
from dpquant_compile.cli.models import InputSpec, capture
from dpquant_compile.errors import IsolationError

if TYPE_CHECKING:
    from dpquant_compile.cli.output import Output
    from dpquant_compile.sites import SiteTable

__all__ = ["COMMAND"]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a task's name, or package.module:callable that builds one")
    parser.add_argument(
        "--input",
        action="append",
        type=InputSpec.parse,
        metavar="SHAPE[:DTYPE]",
        help="an argument of forward(), batch first, such as 1x3x32x32 or 8x128:int64; once for each argument. Output "
        "shapes and FLOPs are known with it only. A task has its own",
    )
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="where a task finds local weights")


def _run(args: argparse.Namespace, output: "Output") -> int:
    from dpquant_compile.privacy.validate import refuse_layers

    model = capture(args.model, args.input, args.data)
    sites = model.sites
    _show(args.model, sites, output)
    if any(site.flops is None for site in sites):
        output.note("Output shapes and FLOPs are not known without --input, such as --input 1x3x32x32.")
    try:
        refuse_layers(model)
    except IsolationError as error:
        output.note(f"Private training will refuse this model: {error}.")
    return DONE


def _show(model: str, sites: "SiteTable", output: "Output") -> None:
    from dpquant_compile.cli.output import shape, share, table

    total = None if any(site.flops is None for site in sites) else sum(site.flops or 0 for site in sites)
    document: dict[str, Any] = {"model": model, "flops": total, "sites": [], "skipped": []}
    rows, skipped = [], []
    for site in sites:
        part = site.flops / total if site.flops is not None and total else None
        document["sites"].append(
            {
                "name": site.name,
                "op": site.op,
                "weight": site.weight_shape,
                "output": site.output_shape,
                "flops": site.flops,
                "share": part,
                "source": site.source,
            }
        )
        flops = "–" if site.flops is None else f"{site.flops:,}"
        rows.append((site.name, site.op, shape(site.weight_shape), shape(site.output_shape), flops, share(part)))
    for skip in sites.skipped:
        document["skipped"].append({"name": skip.name, "op": skip.op, "reason": skip.reason, "source": skip.source})
        skipped.append((skip.name, skip.op, skip.reason))
    count = f"{len(sites)} {'site' if len(sites) == 1 else 'sites'}"
    summed = "" if total is None else f", {total:,} FLOPs forward per sample"
    head = ("site", "op", "weight", "output", "FLOPs", "share")
    shown = [table(head, rows, title=f"{model}: {count}{summed}", right=("FLOPs", "share"))]
    if skipped:
        shown.append(table(("name", "op", "why"), skipped, title="not sites, always in full precision"))
    output.result(document, *shown)


COMMAND = Command(
    "sites",
    "show the layers of a model that can be switched to low precision, with shapes and FLOPs",
    (
        "dpquant sites cnn-digits",
        "dpquant sites torchvision.models:resnet18 --input 1x3x224x224",
        "dpquant sites mypackage.models:build --input 8x128:int64 --input 8x128:bool --json",
    ),
    _add_arguments,
    _run,
)
