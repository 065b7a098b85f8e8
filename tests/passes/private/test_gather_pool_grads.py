"""gather_pool_grads: the gradient of max pooling is gathered by pixel, with the same bits."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, fx
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from dpquant_compile.backends.cpu_int8 import build as native
from dpquant_compile.errors import KernelError
from dpquant_compile.passes.private.gather_pool_grads import gather_pool_grads
from dpquant_compile.passes.private.merge_equal_nodes import merge_equal_nodes
from dpquant_compile.passes.private.run_inductor_passes import run_inductor_passes

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))

# What F.max_pool2d takes behind the map, and the map's height and width.
POOLS: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
    "resnet": ({"kernel_size": 3, "stride": 2, "padding": 1}, (9, 8)),
    "apart": ({"kernel_size": 2}, (6, 5)),
    "uneven": ({"kernel_size": (2, 3), "stride": (1, 2), "padding": (1, 0)}, (5, 7)),
    "ceil": ({"kernel_size": 3, "stride": 2, "ceil_mode": True}, (6, 6)),
    "whole": ({"kernel_size": (4, 5)}, (4, 5)),
}


def inputs(kind: str, channels: int = 5) -> list[Tensor]:
    """A map with ties, NaN and infinity, and a gradient of what is pooled from it."""
    words, size = POOLS[kind]
    g = torch.Generator().manual_seed(0)
    x = torch.randint(-2, 3, (3, channels, *size), generator=g).float().contiguous(memory_format=torch.channels_last)
    x[1, 2, 2, 3], x[2, 0, 1, 1] = torch.nan, torch.inf
    y = F.max_pool2d(x, **words)
    return [x, torch.randn(y.shape, generator=g).contiguous(memory_format=torch.channels_last)]


def joint(kind: str, given: list[Tensor], more: Any = lambda dx: dx) -> fx.GraphModule:
    """The pooled map and its input's gradient, laid by pixel, as Inductor decomposes them."""

    def run(x: Tensor, grad: Tensor) -> list[Tensor]:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            y = F.max_pool2d(leaf, **POOLS[kind][0])
            (dx,) = torch.autograd.grad(y, leaf, grad)
        return [y.detach(), more(dx.contiguous(memory_format=torch.channels_last))]

    with FakeTensorMode() as mode:
        fake: list[Any] = [mode.from_tensor(value, static_shapes=True) for value in given]
        gm = make_fx(run, tracing_mode="real", decomposition_table=select_decomp_table())(*fake)
    gm.graph.eliminate_dead_code()
    return merge_equal_nodes(run_inductor_passes(gm).graph_module).graph_module


def called(gm: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]


def test_print() -> None:
    gm, modified = gather_pool_grads(joint("resnet", inputs("resnet")))
    gm.graph.lint()
    gm.recompile()
    assert modified
    lines = [line.split(";")[0].strip() for line in gm.code.splitlines()]
    assert_expected_inline(
        "\n".join(line for line in lines if "torch.ops" in line or "return" in line),
        """\
_low_memory_max_pool_with_offsets = torch.ops.prims._low_memory_max_pool_with_offsets.default(x_1, [3, 3], [2, 2], [1, 1], [1, 1], False)
max_pool_grad_default = torch.ops.dpquant.max_pool_grad.default(grad_1, getitem_1, [9, 8], [3, 3], [2, 2], [1, 1])
return [alias_1, max_pool_grad_default]""",
    )


@pytest.mark.parametrize("kind", POOLS)
@pytest.mark.parametrize("channels", [5, 32])
def test_results_are_the_same_bits(kind: str, channels: int) -> None:
    given = inputs(kind, channels)
    gm = joint(kind, given)
    expected = gm(*given)
    gm, modified = gather_pool_grads(gm)
    gm.graph.lint()
    gm.recompile()
    assert modified and not any("scatter" in name or "clone" in name for name in called(gm))
    found = gm(*given)
    assert torch.equal(found[1], expected[1]) and found[1].stride() == expected[1].stride()
    leaf = given[0].clone().requires_grad_()
    F.max_pool2d(leaf, **POOLS[kind][0]).backward(given[1])
    assert leaf.grad is not None and torch.equal(found[1], leaf.grad)


def test_samples_are_apart() -> None:
    x, grad = inputs("resnet")
    gm = gather_pool_grads(joint("resnet", [x, grad])).graph_module
    gm.recompile()
    together = gm(x, grad)[1]
    grad[1] = torch.nan
    assert torch.equal(gm(x, grad)[1][[0, 2]], together[[0, 2]])


def unchanged(gm: fx.GraphModule) -> bool:
    before = gm.print_readable(print_output=False)
    return not gather_pool_grads(gm).modified and gm.print_readable(print_output=False) == before


def test_other_graphs_stay() -> None:
    double = [value.double() for value in inputs("resnet")]
    assert unchanged(joint("resnet", double))

    def scatter(x: Tensor, index: Tensor) -> Tensor:
        return torch.zeros(4, 6).scatter_add(1, index, x).view(2, 2, 6)

    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(value) for value in (torch.randn(4, 3), torch.zeros(4, 3, dtype=torch.int64))]
        assert unchanged(make_fx(scatter)(*fake))


def test_tensors_that_do_not_fit_are_refused() -> None:
    grad, taps = torch.zeros(1, 2, 3, 3), torch.zeros(1, 2, 3, 4, dtype=torch.int8)
    with pytest.raises(KernelError, match="does not fit its taps"):
        torch.ops.dpquant.max_pool_grad(grad, taps, [6, 6], [2, 2], [2, 2], [0, 0])
