"""inline_modules, functionalize and canonicalize: one spelling for everything, the same numbers."""

import contextlib
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, fx, nn

from dpquant_compile.errors import CaptureError, InplaceAliasError
from dpquant_compile.passes.canonical.canonicalize import canonicalize
from dpquant_compile.passes.canonical.functionalize import functionalize
from dpquant_compile.passes.canonical.inline_modules import inline_modules
from dpquant_compile.passes.canonical.mark_sites import collect_sites
from tests.support.models import (
    BatchNormNet,
    Functional,
    GroupNormNet,
    Hooked,
    Residual,
    after,
    canonical,
    conv_zoo,
    gradients,
    program,
    seeded,
    traced,
    tracked,
)


class Code(nn.Module):
    """A model of one function."""

    def __init__(self, function: Any, **tensors: Any) -> None:
        super().__init__()
        self.function = function
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def unchanged(transform: Any, gm: fx.GraphModule) -> None:
    code = gm.code
    result = transform(gm)
    assert result.modified is False and result.graph_module is gm
    gm.recompile()
    assert gm.code == code


def same_results(model: nn.Module, gm: fx.GraphModule, *args: Tensor) -> None:
    parameters = list(model.parameters())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using padding='same' with even kernel")
        expected = gradients(model, list(args), parameters)
    torch.testing.assert_close(gradients(gm, list(args), parameters), expected, rtol=0, atol=0)


def test_inline_golden() -> None:
    gm = after(traced(seeded(lambda: Residual(4))), inline_modules)
    assert_expected_inline(
        program(gm),
        """\
def forward(self, x : torch.Tensor) -> torch.Tensor:
    conv1_weight = self.conv1.weight
    conv2d = torch.conv2d(x, conv1_weight, None, (1, 1), (1, 1), (1, 1), 1)
    norm1_weight = self.norm1.weight
    norm1_bias = self.norm1.bias
    group_norm = torch.nn.functional.group_norm(conv2d, 2, weight = norm1_weight, bias = norm1_bias, eps =
        1e-05)
    relu = torch.nn.functional.relu(group_norm, inplace = False)
    conv2_weight = self.conv2.weight
    conv2_bias = self.conv2.bias
    conv2d_1 = torch.conv2d(relu, conv2_weight, conv2_bias, (1, 1), (1, 1), (1, 1), 1)
    add = x + conv2d_1
    return add""",
    )


def test_inline_batch_norm_golden() -> None:
    gm = after(traced(nn.Sequential(nn.BatchNorm1d(2), nn.ReLU(inplace=True))), inline_modules)
    assert_expected_inline(
        program(gm),
        """\
def forward(self, input):
    input_1 = input
    _0_num_batches_tracked = getattr(self, "0").num_batches_tracked
    add_ = _0_num_batches_tracked.add_(1)
    _0_running_mean = getattr(self, "0").running_mean
    _0_running_var = getattr(self, "0").running_var
    _0_weight = getattr(self, "0").weight
    _0_bias = getattr(self, "0").bias
    batch_norm = torch.nn.functional.batch_norm(input_1, _0_running_mean, _0_running_var, weight = _0_weight,
        bias = _0_bias, training = True, momentum = 0.1, eps = 1e-05)
    relu = torch.nn.functional.relu(batch_norm, inplace = True)
    return relu""",
    )


def test_functionalize_golden() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        y = x * 2
        y += x
        F.relu(y, inplace=True)
        y[:, 0] = 1
        return y.mul_(3)

    assert_expected_inline(
        program(after(traced(Code(forward)), functionalize)),
        """\
def forward(self, x : torch.Tensor) -> typing_Any:
    mul = x * 2
    iadd = mul + x
    relu = torch.nn.functional.relu(iadd, False)
    clone = relu.clone()
    clone[(slice(None, None, None), 0)] = 1;  setitem = clone
    mul_ = clone.mul(3)
    return mul_""",
    )


def test_canonicalize_golden() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = F.conv2d(x, self.w, padding="same", stride=1)
        x = F.conv2d(input=x, weight=self.v, padding=1)
        return F.linear(x, bias=None, weight=self.u)

    weights = {"w": torch.ones(2, 1, 2, 3), "v": torch.ones(2, 2, 3, 3), "u": torch.ones(3, 4)}
    gm = after(traced(Code(forward, **weights)), canonicalize)
    assert_expected_inline(
        program(gm),
        """\
def forward(self, x : torch.Tensor) -> typing_Any:
    w = self.w
    pad = torch.nn.functional.pad(x, (0, 0, 0, 1))
    conv2d = torch.conv2d(pad, w, None, (1, 1), (0, 1), (1, 1), 1)
    v = self.v
    conv2d_1 = torch.conv2d(conv2d, v, None, (1, 1), (1, 1), (1, 1), 1)
    u = self.u
    linear = torch._C._nn.linear(conv2d_1, u, None)
    return linear""",
    )


def test_what_is_done_already_is_left_alone() -> None:
    gm = canonical(seeded(GroupNormNet))
    for transform in (inline_modules, functionalize, canonicalize):
        unchanged(transform, gm)


def test_passes_have_nothing_to_do_without_work() -> None:
    for transform in (inline_modules, functionalize, canonicalize):
        unchanged(transform, traced(Code(lambda self, x: torch.relu(x) + 1)))


@pytest.mark.parametrize("name", list(conv_zoo()))
def test_every_conv_computes_the_same(name: str) -> None:
    torch.manual_seed(0)
    conv, shape = conv_zoo()[name]
    model, x = nn.Sequential(conv), torch.randn(shape).requires_grad_()
    gm = canonical(model)
    same_results(model, gm, x)
    (site,) = collect_sites(gm)
    assert site.geometry is not None and all(isinstance(p, int) for p in site.geometry.padding)


@pytest.mark.parametrize("make", [GroupNormNet, BatchNormNet])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_models_compute_the_same(make: Any, training: bool) -> None:
    model, x = seeded(make).train(training), torch.randn(3, 3, 8, 8)
    same_results(model, canonical(model), x)


def test_functional_calls_compute_the_same() -> None:
    model, x = seeded(Functional), torch.randn(3, 2, 5, 5)
    same_results(model, canonical(model), x)


@pytest.mark.parametrize(
    "module",
    [
        nn.LayerNorm(4), nn.Dropout(0.5, inplace=True), nn.LeakyReLU(0.2, inplace=True), nn.GELU(), nn.Flatten(0),
        nn.Softmax(-1), nn.Hardtanh(inplace=True), nn.SiLU(inplace=True), nn.PReLU(), nn.ReLU6(inplace=True),
        nn.RMSNorm(4), nn.Identity(), nn.Threshold(0.1, 20, inplace=True), nn.ELU(inplace=True),
        nn.Unflatten(1, (2, 2)),
    ],
    ids=lambda module: type(module).__name__,
)  # fmt: skip
def test_modules_compute_the_same_inline(module: nn.Module) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), module), torch.randn(3, 4)
    gm = after(traced(model), inline_modules, functionalize)
    assert not [n for n in gm.graph.nodes if n.op == "call_module"]
    results = []
    for function in (model, gm):
        torch.manual_seed(0)
        results.append(gradients(function, [x], list(model.parameters())))
    torch.testing.assert_close(results[1][0], results[0][0], rtol=0, atol=0)
    torch.testing.assert_close(results[1], results[0])  # ELU in place has another formula for its gradient


def test_a_module_with_hooks_stays_whole() -> None:
    gm = after(traced(seeded(Hooked)), inline_modules)
    assert [n.target for n in gm.graph.nodes if n.op == "call_module"] == ["watched"]


def test_a_module_that_fx_cannot_trace_stays_whole() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.fc = nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.lstm(x)[0])

    model, x = Recurrent(), torch.randn(2, 3, 4)
    gm = after(traced(model), inline_modules)
    assert [n.target for n in gm.graph.nodes if n.op == "call_module"] == ["lstm"]
    same_results(model, gm, x)


def test_lazy_modules_are_refused_with_a_reason() -> None:
    with pytest.raises(CaptureError, match=r"module '1' \(LazyLinear\) has parameters without a shape: run the lazy"):
        after(traced(nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(2))), inline_modules)


def inplace(gm: fx.GraphModule) -> list[str]:
    """In-place calls that are left, other than on the fresh copies that functionalize makes."""
    names = [(n, str(n.target if n.op == "call_method" else getattr(n.target, "__name__", ""))) for n in gm.graph.nodes]
    fresh = [n for n, _ in names if n.args and isinstance(n.args[0], fx.Node) and n.args[0].target == "clone"]
    return [name for n, name in names if name.endswith("_") and not name.startswith("_") and n not in fresh]


def _out(self: nn.Module, x: Tensor) -> Tensor:
    y = x * 2
    torch.add(x, y, out=y)
    return y


def _view(self: nn.Module, x: Tensor) -> Tensor:
    y = (x * 2).view(-1)
    y.add_(1)
    return y


def _row(self: nn.Module, x: Tensor) -> Tensor:
    y = x * 2
    y[0] += 1
    return y


def _metadata(self: nn.Module, x: Tensor) -> Tensor:
    y = x * 2
    y.unsqueeze_(0)
    y.transpose_(0, 1)
    return y


@pytest.mark.parametrize("function", [_out, _view, _row, _metadata])
def test_inplace_code_computes_the_same(function: Any) -> None:
    model, x = Code(function), torch.randn(3, 4)
    gm = after(traced(model), functionalize)
    torch.testing.assert_close(gm(x), model(x), rtol=0, atol=0)
    assert not inplace(gm)


METHODS = (
    "add_(1) sub_(1) mul_(2) div_(2) pow_(2) clamp_(0, 1) abs_() neg_() exp_() sigmoid_() tanh_() relu_() zero_() "
    "fill_(3) copy_(x) masked_fill_(x>0,2.0) index_fill_(1,(x[0,:1]*0).long(),2.0) fill_diagonal_(1) floor_() sqrt_() "
    "cumsum_(1) scatter_(1,(x*0).long(),5.0) clip_(min=0) lerp_(x,0.5) addcmul_(x,x) squeeze_(0) t_() erf_()"
)


@pytest.mark.parametrize("call", METHODS.replace(", ", ",").split())
def test_inplace_methods_compute_the_same(call: str) -> None:
    method = eval(f"lambda y, x: y.{call}", {"torch": torch})

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        y = x * 2
        method(y, x)
        return y * 1

    model, x = Code(forward), torch.rand(3, 4) + 0.1
    gm = after(traced(model), functionalize)
    torch.testing.assert_close(gm(x), model(x), rtol=0, atol=0)
    assert not inplace(gm)


@pytest.mark.parametrize("name", "relu_ leaky_relu_ elu_ selu_ celu_ hardtanh_".split())
def test_inplace_functions_are_rewritten(name: str) -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        y = x * 2
        getattr(F, name)(y)
        return y

    model, x = Code(forward), torch.randn(3, 4)
    gm = after(traced(model), functionalize)
    torch.testing.assert_close(gm(x), model(x), rtol=0, atol=0)
    assert not inplace(gm)


def test_inplace_that_would_change_the_type_is_refused() -> None:
    # y += offset keeps the type of y, but y + offset promotes; types are known once the batch is followed.
    def forward(self: Any, x: Tensor) -> Tensor:
        y = x * 2
        y += self.offset
        return y

    model = Code(forward, offset=torch.ones(4, dtype=torch.float64))
    with pytest.raises(InplaceAliasError, match=r"is an in-place operation on torch\.float32.* gives torch\.float64"):
        tracked(model, torch.randn(3, 4))
    assert tracked(model, torch.randn(3, 4, dtype=torch.float64))


def test_writes_to_state_stay() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.total.add_(x.sum())
        self.rows[0] = x[0]
        self.rows.view(-1).mul_(2)
        return x + self.total

    model = Code(forward, total=torch.zeros(()), rows=torch.zeros(2, 4))
    gm, x = after(traced(model), functionalize), torch.ones(3, 4)
    torch.testing.assert_close(gm(x), x + 12)
    torch.testing.assert_close((model.total, model.rows[0]), (torch.tensor(12.0), torch.full((4,), 2.0)))


def test_chained_writes_to_state_stay() -> None:
    model = Code(lambda self, x: (self.ema.mul_(0.5).add_(x.mean(0)), x)[1], ema=torch.ones(4))
    after(traced(model), functionalize)(torch.ones(3, 4))
    torch.testing.assert_close(model.ema, torch.full((4,), 1.5))


def _alias_view(self: nn.Module, x: Tensor) -> Tensor:
    y = x * 2
    first = y[0]
    y.add_(1)
    return first


def _alias_base(self: nn.Module, x: Tensor) -> Tensor:
    y = x * 2
    y.view(-1).mul_(3)
    return y


@pytest.mark.parametrize(("function", "line"), [(_alias_view, "y.add_(1)"), (_alias_base, "y.view(-1).mul_(3)")])
def test_an_alias_that_is_read_later_is_refused(function: Any, line: str) -> None:
    with pytest.raises(InplaceAliasError) as info:
        after(traced(Code(function)), functionalize)
    message = str(info.value)
    assert line in message and "test_canonicalize.py:" in message and "clone()" in message


def _chunks(self: nn.Module, x: Tensor) -> Tensor:
    a, b = (x * 2).chunk(2, 1)
    a += 1
    return torch.cat((a, b), 1)


def _index(self: nn.Module, x: Tensor) -> Tensor:
    y = x * 2
    picked = y[:, [0, 1]]
    y.add_(1)
    return picked


@pytest.mark.parametrize("function", [_chunks, _index])
def test_what_may_share_memory_is_refused_too(function: Any) -> None:
    # Disjoint chunks and copies by index would be harmless; that they are is not visible in the graph.
    with pytest.raises(InplaceAliasError, match="shares its memory"):
        after(traced(Code(function)), functionalize)


HIDDEN = {
    "ravel": lambda y: y.ravel(),
    "as_strided": lambda y: y.as_strided((2,), (1,)),
    "type": lambda y: y.type(torch.float32),
    "eval dropout": lambda y: F.dropout(y, training=False),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_every_alias_is_refused_or_right(name: str) -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        y = x * 2
        HIDDEN[name](y).add_(1)
        return y

    model, x = Code(forward), torch.randn(3, 4)
    with contextlib.suppress(InplaceAliasError):
        torch.testing.assert_close(after(traced(model), functionalize)(x), model(x))
