"""The public entry points."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from dpquant_compile.errors import CompileSpecError
from dpquant_compile.module import CompiledModule
from dpquant_compile.numerics.recipe import Recipe
from dpquant_compile.sites import SiteFilter
from dpquant_compile.spec import CompileSpec

__all__ = ["compile"]


def compile(
    model: nn.Module,
    budget: float,
    *,
    format: str | None = None,
    backend: str = "auto",
    sites: "SiteFilter | Iterable[SiteFilter] | None" = None,
    quantize_outputs: str | None = None,
    recipe: str | Recipe | None = None,
    high: str | None = None,
    seed: int = 0,
    quantize_eval: bool = False,
    inner: str | None = None,
    example_inputs: "Sequence[Any] | Mapping[str, Any] | None" = None,
) -> CompiledModule:
    """Compile `model` so that `budget` of its convs and linears run in low precision, a choice that can change.

    model             any module; torch.fx traces it now, or Dynamo at the first forward
    budget            how many sites run in low precision: an int k, or a fraction such as 0.75
    format            one number format for all operands, in place of a recipe; see `dpq.format_names()`
    backend           kernels of the quantized sites: "auto" picks the best for each, "reference" is plain torch
    sites             which convs and linears to consider: a name pattern, a module type, an op, a function of a
                      `Site`, or a list of these; all if None
    quantize_outputs  "none", "flow" or "all": whether results are quantized too, besides the operands
    recipe            how input, weight and output gradient are rounded: "int4" (the default), "int4_w8", "int8", "luq",
                      "nvfp4", "fp8", "paper" (as published), or a `dpq.Recipe`
    high              what sites run in that are not low: "float32" (if neither this nor the recipe says else),
                      "bfloat16" or "int8"
    seed              of the random rounding and of the first policy, which is a uniform draw
    quantize_eval     eval() follows the policy as well
    inner             compiler of the graph around the sites: "inductor", "regions", "aot_eager" or "eager"; by
                      default "inductor", and "eager" for the reference backend. "regions" is Inductor, which compiles
                      once what a private program repeats; steps take more time and memory then
    example_inputs    arguments of one forward call, to capture the graph now where only Dynamo can
    """
    if not isinstance(model, nn.Module):
        raise CompileSpecError(f"model is a {type(model).__name__}, not a torch.nn.Module")
    if isinstance(model, CompiledModule):
        raise CompileSpecError("the model is compiled already; compile the original module instead")
    if isinstance(model, nn.DataParallel):
        raise CompileSpecError(
            "nn.DataParallel copies a model in each forward, which a compiled one cannot be. Fix: compile the model "
            "inside, dpquant_compile.compile(model.module, …); for several devices see DistributedDataParallel"
        )
    if inside := next((name for name, child in model.named_modules() if isinstance(child, CompiledModule)), None):
        raise CompileSpecError(
            f"submodule {inside!r} is compiled already. Fix: compile the whole model once, made of plain modules; "
            f"that of {inside!r} is its .original, and sites= chooses layers"
        )
    spec = CompileSpec.build(
        budget,
        format=format,
        backend=backend,
        quantize_outputs=quantize_outputs,
        recipe=recipe,
        high=high,
        seed=seed,
        quantize_eval=quantize_eval,
        inner=inner,
    )
    compiled = CompiledModule(model, spec, sites)
    if isinstance(example_inputs, torch.Tensor):
        raise CompileSpecError("example_inputs is a tensor; give the arguments of a call, such as example_inputs=(x,)")
    if example_inputs is not None:
        if isinstance(example_inputs, Mapping):
            compiled.capture(**example_inputs)
        else:
            compiled.capture(*example_inputs)
    return compiled
