"""fuse_norms: a group norm, a sum and a ReLU are one operator, forward and backward."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from functorch.compile import make_boxed_func
from torch import Tensor, fx, nn
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from dpquant_compile.backends.cpu_int8 import build as native
from dpquant_compile.passes.private.fuse_norms import fuse_norms
from dpquant_compile.passes.private.merge_equal_nodes import merge_equal_nodes
from dpquant_compile.passes.private.run_inductor_passes import run_inductor_passes
from dpquant_compile.privacy.clipping import grad_rules, joint_graph, program
from tests.support.private import clipped_sums, made_private

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))

SIZE = (2, 16, 3, 4)


def inputs() -> list[Tensor]:
    """Two maps, weight, bias, a gradient."""
    g = torch.Generator().manual_seed(0)
    x, other, grad = (torch.randn(SIZE, generator=g).contiguous(memory_format=torch.channels_last) for _ in range(3))
    return [x, other, torch.randn(16, generator=g), torch.randn(16, generator=g), grad]


def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    y: Tensor = torch.ops.dpquant.group_norm(x, None, weight, bias, 4, 1e-5, False)[0]
    return y


Body = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
# What follows the norm of x, and which of the two maps comes first.
BODIES: dict[str, Body] = {
    "relu": lambda x, other, weight, bias: torch.relu(norm(x, weight, bias)),
    "sum": lambda x, other, weight, bias: torch.relu(other + norm(x, weight, bias)),
    "two norms": lambda x, other, weight, bias: torch.relu(norm(x, weight, bias) + norm(other, bias, weight)),
}


def joint(body: Body) -> fx.GraphModule:
    """The result, the gradients of both maps, and those of the weight by sample, as a clipping rule takes them."""

    def run(x: Tensor, other: Tensor, weight: Tensor, bias: Tensor, grad: Tensor) -> list[Any]:
        with torch.enable_grad():
            maps = [x.detach().requires_grad_(), other.detach().requires_grad_()]
            z = body(*maps, weight, bias)
            found = torch.autograd.grad(z, maps, grad, allow_unused=True)
        return [z.detach(), *(value for value in found if value is not None)]

    with FakeTensorMode() as mode:
        fake: list[Any] = [mode.from_tensor(value, static_shapes=True) for value in inputs()]
        gm = make_fx(run, tracing_mode="real", decomposition_table=select_decomp_table())(*fake)
    gm.graph.eliminate_dead_code()
    return merge_equal_nodes(run_inductor_passes(gm).graph_module).graph_module


def called(gm: fx.GraphModule) -> list[str]:
    return [str(node.target).removesuffix(".default") for node in gm.graph.nodes if node.op == "call_function"]


def test_print() -> None:
    gm, modified = fuse_norms(joint(BODIES["sum"]))
    gm.graph.lint()
    assert modified
    gm.recompile()
    lines = [line.split(";")[0].replace("torch.ops.", "").strip() for line in gm.code.splitlines()]
    wanted = ("group_norm", "getitem", "return")
    assert_expected_inline(
        "\n".join(line for line in lines if any(word in line for word in wanted)),
        """\
group_norm_default = dpquant.group_norm.default(x_1, other_1, weight_1, bias_1, 4, 1e-05, True)
getitem_8 = group_norm_default[0]
getitem_9 = group_norm_default[1]
getitem_10 = group_norm_default[2]
getitem_11 = group_norm_default[3]
group_norm_grad_default = dpquant.group_norm_grad.default(grad_1, getitem_11, x_1, getitem_9, getitem_10, weight_1, True)
getitem_12 = group_norm_grad_default[3]
getitem_4 = group_norm_grad_default[0]
return [getitem_8, getitem_4, getitem_12]""",
    )


@pytest.mark.parametrize("kind", BODIES)
def test_results_are_the_same_bits(kind: str) -> None:
    gm = joint(BODIES[kind])
    expected = gm(*inputs())
    gm, modified = fuse_norms(gm)
    gm.graph.lint()
    gm.recompile()
    assert modified and not any(name.startswith(("aten.relu", "aten.where", "aten.le")) for name in called(gm))
    assert all(map(torch.equal, gm(*inputs()), expected))


@pytest.mark.parametrize(
    "body",
    [
        lambda x, other, weight, bias: norm(x, weight, bias) + other,
        lambda x, other, weight, bias: torch.relu(x) + other,
        lambda x, other, weight, bias: torch.relu((y := norm(x, weight, bias)) + other) * y,
        lambda x, other, weight, bias: torch.relu(torch.add(norm(x, weight, bias), other, alpha=2)),
        lambda x, other, weight, bias: torch.relu(norm(x, weight, bias) + other[:1]),
    ],
    ids=["no relu", "no norm", "read twice", "scaled", "other shape"],
)
def test_what_is_no_such_chain_stays(body: Body) -> None:
    gm = joint(body)
    before = str(gm.graph)
    result = fuse_norms(gm)
    assert result.graph_module is gm and not result.modified and str(gm.graph) == before


def test_a_mask_of_something_else_stays() -> None:
    """The model may itself compare the result with zero, and use that."""
    gm = joint(lambda x, other, weight, bias: (z := torch.relu(norm(x, weight, bias))) + torch.where(z <= 0, other, z))
    assert not fuse_norms(gm).modified


class Residual(nn.Module):
    """Two blocks: with a shortcut that has a norm of its own, and with a plain one."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16)
        self.side, self.norm_side = nn.Conv2d(16, 32, 1, 2), nn.GroupNorm(8, 32)
        self.convs = nn.ModuleList(nn.Conv2d(32 if i else 16, 32, 3, 1 if i else 2, 1, bias=False) for i in range(4))
        self.norms = nn.ModuleList(nn.GroupNorm(8, 32) for _ in range(4))
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        side = self.norm_side(self.side(x))
        for i in (0, 2):
            y = torch.relu(self.norms[i](self.convs[i](x)))
            side = x = torch.relu(self.norms[i + 1](self.convs[i + 1](y)) + side)
        out: Tensor = self.head(x.mean((2, 3)))
        return out


def residual_sums(monkeypatch: pytest.MonkeyPatch, low: bool) -> tuple[dict[str, Tensor], list[str]]:
    """Clipped sums of a residual net, and the operators of its programs, which are interpreted."""
    called: list[str] = []

    def interpret(gm: Any, kind: str, inner: str, recorder: Any) -> Any:
        called.extend(str(node.target) for node in gm.graph.nodes if node.op == "call_function")
        return make_boxed_func(gm.forward)

    monkeypatch.setattr(program, "compile_graph", interpret)
    torch.manual_seed(0)
    net = Residual()
    for name, parameter in net.named_parameters():
        if "norm" in name:
            nn.init.normal_(parameter, 1.0 if "weight" in name else 0.0, 0.3)
    model = made_private(net, 6, inner="inductor")[0]
    model.set_policy("all" if low else "none")
    x = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    return clipped_sums(model, [x]), called


@pytest.mark.slow
@pytest.mark.parametrize("low", [False, True])
def test_private_sums_are_those_of_the_reference(low: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found, called = residual_sums(monkeypatch, low)
    assert called.count("dpquant.group_norm.default") == called.count("dpquant.group_norm_grad.default") == 6
    assert not any("relu" in name for name in called)
    for module in (joint_graph, grad_rules):
        monkeypatch.setattr(module, "can_normalise", lambda *_: False)
    expected, called = residual_sums(monkeypatch, low)
    assert not any("group_norm" in name for name in called)
    for name, value in expected.items():
        assert (found[name] - value).abs().max() <= 1e-5 * value.abs().max(), name
