"""What becomes of the Triton kernels when they are compiled for real GPUs, none of which is needed?

    python benchmarks/triton_kernels.py --json benchmarks/results/triton_kernels.json
    python benchmarks/triton_kernels.py --smoke

The launches of a few sites are recorded, with the tiles that they would run with. Each kernel among them is compiled by
Triton, with its own assembler, for every compute capability, and its machine code is read back: registers of a thread,
bytes of shared memory, instructions that move registers to local memory and back (spills), and instructions of the
tensor cores. The figures also name float instructions of the PTX that IEEE 754 does not round exactly, or that contract
a · b + c: there must be none. Nothing runs: this says nothing about speed.
"""

import argparse
import json
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.pop("TRITON_INTERPRET", None)  # before anything imports triton: nothing is compiled in its interpreter

import torch
from torch import Tensor

from dpquant_compile.backends.ops.site import output_shape
from dpquant_compile.backends.registry import Shapes, SiteCall, Streams
from dpquant_compile.backends.triton import kernel as family
from dpquant_compile.numerics.random_bits import site_keys
from dpquant_compile.numerics.recipe import Recipe, get_recipe
from dpquant_compile.sites import BatchAxis, ConvGeometry

TARGETS = (75, 80, 90, 100)
MULTIPLY = ("product", "norms", "weighted", "gradients")
WARPS, STAGES = 4, 3  # what Triton launches with
_TYPES = {torch.float32: "fp32", torch.int8: "i8", torch.int32: "i32", torch.int64: "i64"}
_INEXACT = re.compile(r"\b(?:fma\.[\w.]*f(?:32|64)|div\.full[\w.]*|\w+\.approx[\w.]*)")
_MATRIX = re.compile(r"\b(?:IMMA|IGMMA)\.[\w.]*S8\.S8[\w.]*")


@dataclass(frozen=True)
class Launch:
    """A kernel with the types and constants that it is compiled for; `name` says what for."""

    name: str
    kernel: Any
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, int], ...]
    divisible: tuple[int, ...]

    @property
    def multiplies(self) -> bool:
        """Whether tensor cores must be in its code."""
        return self.name.split()[0] in MULTIPLY


@dataclass(frozen=True)
class Compiled:
    """What one kernel became for one compute capability; `refused` is what Triton answers instead of code."""

    kernel: str
    target: int
    registers: int = 0
    shared: int = 0
    spills: int = 0
    matrix: str = ""
    inexact: str = ""
    refused: str = ""


# A name, the recipe, the shape of the input and of the weight, and the padding.
SITES = (
    ("conv", "int4", (32, 128, 16, 16), (128, 128, 3, 3), 1),
    ("first conv", "int8", (32, 3, 32, 32), (64, 3, 3, 3), 1),
    ("linear", "luq_fp4", (32, 128, 768), (3072, 768), 0),
    ("long linear", "int8", (128, 1 << 18), (64, 1 << 18), 0),
)


def called(recipe: str, x: tuple[int, ...], weight: tuple[int, ...], padding: int) -> tuple[SiteCall, Shapes]:
    """A site, as kernels are called for it."""
    geometry = ConvGeometry((1, 1), (padding,) * 2, (1, 1), 1) if len(x) == 4 else None
    chosen = Recipe.of_format(recipe) if recipe == "luq_fp4" else get_recipe(recipe)
    call = SiteCall("conv2d" if geometry else "linear", chosen, BatchAxis(0), BatchAxis(0), geometry, 0, 0)
    return call, Shapes(x, weight, output_shape(x, weight, geometry), x[0])


@contextmanager
def recorded() -> Iterator[list[tuple[Any, tuple[Any, ...], dict[str, int]]]]:
    """The launches of the family, which are noted and not done."""
    found: list[tuple[Any, tuple[Any, ...], dict[str, int]]] = []
    with patch.object(
        family, "launch", lambda kernel, grid, *arguments, **more: found.append((kernel, arguments, more))
    ):
        yield found


def specialised(name: str, kernel: Any, arguments: tuple[Any, ...], constants: dict[str, int]) -> Launch:
    """A launch as Triton compiles it: numbers of 1 are constants, and it notes what 16 divides."""
    signature, values, divisible = [], dict(constants), []
    for place, (word, value) in enumerate(zip(kernel.arg_names, (*arguments, *constants.values()), strict=True)):
        if isinstance(value, Tensor):
            signature.append((word, f"*{_TYPES[value.dtype]}"))
            if value.data_ptr() % 16 == 0:
                divisible.append(place)
        elif word in constants or value == 1:
            signature.append((word, "constexpr"))
            values[word] = value
        else:
            signature.append((word, "i32"))
            if value % 16 == 0:
                divisible.append(place)
    return Launch(name, kernel, tuple(signature), tuple(values.items()), tuple(divisible))


def launches(sites: tuple[Any, ...]) -> list[Launch]:
    """The kernels that private steps of these sites launch, each once."""
    found: dict[str, Launch] = {}
    site = family.TritonSite()
    for name, recipe, x_shape, w_shape, padding in sites:
        call, shapes = called(recipe, x_shape, w_shape, padding)
        chosen = call.recipe
        x, weight, grad = (torch.empty(shape) for shape in (shapes.x, shapes.weight, shapes.y))
        streams, rest = Streams(site_keys(0, 0, ("site",)), torch.arange(shapes.batch)), (shapes, call)
        with recorded() as notes:
            xs = site.operand(x, "input", call, streams)
            grads = site.operand(grad, "grad_output", call, streams)
            packed = site.packed(weight, call, streams)
            specs = [spec for spec in (chosen.input, chosen.grad_output, chosen.weight) for _ in range(2)]
            for spec, (kernel, arguments, constants) in zip(specs, notes, strict=True):
                word = kernel.__name__ if kernel.__name__ == "largest" else f"{kernel.__name__} {spec}"
                found.setdefault(word, specialised(word, kernel, arguments, constants))
            notes.clear()
            site.product(xs, packed, torch.empty(shapes.weight[0]), *rest, streams)
            site.product_grad_input(grads, packed, *rest, streams)
            site.sample_norms(xs, grads, shapes, "", call, streams)
            site.weighted_grad(xs, grads, torch.ones(shapes.batch), *rest, streams)
            site.sample_grads(xs, grads, *rest, streams)
            for kernel, arguments, constants in notes:
                back = kernel.__name__ == "product" and not constants["biased"]
                word = f"{kernel.__name__} {name}" + (", backward" if back else "")
                found.setdefault(word, specialised(word, kernel, arguments, constants))
    return list(found.values())


def compiled(launch: Launch, target: int) -> Compiled:
    """Compile one kernel for one compute capability, and read its code."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    attributes = {(place,): [["tt.divisibility", 16]] for place in launch.divisible}
    source = ASTSource(launch.kernel, dict(launch.signature), dict(launch.constants), attributes)
    options = {"num_warps": WARPS, "num_stages": STAGES, "enable_fp_fusion": False}
    with quiet() as said:
        try:
            done = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
        except RuntimeError as error:
            why = re.search(r"error: (.*?)(?:, but got|$)", Path(said).read_text(), re.MULTILINE)
            return Compiled(launch.name, target, refused=why[1] if why else str(error).splitlines()[0])
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(done.asm["cubin"])
        file.flush()
        usage = _run(triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name)
        code = _run(triton.knobs.nvidia.nvdisasm.path, "-c", file.name)
    numbers = {word: int(value) for word, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", usage)}
    matrix = Counter(_MATRIX.findall(code))
    return Compiled(
        launch.name,
        target,
        registers=numbers["REG"],
        shared=numbers["SHARED"] + done.metadata.shared,
        spills=len(re.findall(r"\b(?:STL|LDL)\b", code)),
        matrix=", ".join(f"{count} {name}" for name, count in sorted(matrix.items())),
        inexact=", ".join(sorted(set(_INEXACT.findall(done.asm["ptx"])))),
    )


def line(rows: list[Compiled], multiplies: bool) -> str:
    """A line of the table: one kernel, its targets beside each other."""
    columns = (
        [f"{row.registers}" for row in rows],
        [f"{row.shared:,}" for row in rows],
        [f"{row.spills}" for row in rows],
        [row.matrix or ("none" if multiplies else "–") for row in rows],
    )
    cells = [" / ".join("–" if row.refused else c for row, c in zip(rows, cell, strict=True)) for cell in columns]
    return f"| {rows[0].kernel} | {' | '.join(cells)} |"


@contextmanager
def quiet() -> Iterator[str]:
    """Where Triton's compiler prints pages about what it refuses: a file."""
    with tempfile.NamedTemporaryFile() as file:
        before = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield file.name
        finally:
            os.dup2(before, 2)
            os.close(before)


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main() -> None:
    """Compile, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--targets", type=int, nargs="+", default=TARGETS, help="compute capabilities, such as 80")
    parser.add_argument("--smoke", action="store_true", help="one rounding and one product, for two targets")
    parser.add_argument("--json", type=Path, default=None, help="write the figures here")
    args = parser.parse_args()
    chosen, targets = launches(SITES), args.targets
    if args.smoke:
        chosen = [next(launch for launch in chosen if launch.name.startswith(name)) for name in ("quantize", "product")]
        targets = (75, 80, 90)
    import triton

    print(
        f"Triton {triton.__version__}, {WARPS} warps, {STAGES} stages; compiled, never run on hardware. In each cell:"
    )
    print(f"compute capability {' / '.join(f'{target / 10:.1f}' for target in targets)}\n")
    print("| kernel | registers | shared memory, bytes | spills | matrix instructions |\n|---|---|---|---|---|")
    rows: list[Compiled] = []
    for launch in chosen:
        found = [compiled(launch, target) for target in targets]
        print(line(found, launch.multiplies), flush=True)
        rows += found
    print()
    for target, why in dict.fromkeys((row.target, row.refused) for row in rows if row.refused):
        print(f"–: Triton refuses products for {target / 10:.1f}: {why}")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(
            json.dumps(dict(triton=triton.__version__, rows=[asdict(row) for row in rows]), indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
