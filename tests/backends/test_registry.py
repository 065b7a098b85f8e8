"""Kernels: the registry, the choice among them, the compiled quantizer against the reference, and the operators."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import dpquant_compile as dpq
from dpquant_compile.backends import registry
from dpquant_compile.backends.compiled import quantize_compiled
from dpquant_compile.backends.ops.site import axis_list, geometry_list, site_call
from dpquant_compile.backends.reference.emulated import REFERENCE_SITE
from dpquant_compile.backends.registry import Kernel, backend_names, choose_kernel, register_kernel
from dpquant_compile.errors import CompileSpecError, FormatError, KernelError, RegistryError
from dpquant_compile.numerics.formats import format_names, get_format
from dpquant_compile.numerics.quantize import quantize_values
from dpquant_compile.numerics.random_bits import site_keys
from dpquant_compile.sites import BatchAxis, ConvGeometry
from tests.support.models import GroupNormNet, seeded

PLAIN = [name for name in format_names() if get_format(name).block is None]
BLOCKED = [name for name in format_names() if get_format(name).block is not None]
CPU = torch.device("cpu")
KEY = site_keys(11, 2, ("site",))[0, 0]

# The compiled quantizer against the reference

SPECIAL = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-38, 1e-45, -1e-40, 3e38, -3e38, 2.0**-126, 0.5, 64.0, 1e-20])
NONFINITE = st.sampled_from([math.nan, math.inf, -math.inf])


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensor, BatchAxis | None]:
    """A tensor of some shape, plain, batch in dimension 1, folded, or a weight, sprinkled with special values."""
    batch = draw(st.integers(0, 5))
    rest = draw(st.lists(st.integers(1, 7), max_size=3))
    kind = draw(st.sampled_from(["plain", "second", "inner", "outer", "both", "weight"]))
    outer, inner = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    shape, axis = [batch, *rest], BatchAxis(0)
    if kind == "second":
        shape, axis = [draw(st.integers(1, 4)), batch, *rest], BatchAxis(1)
    elif kind in ("inner", "outer", "both"):
        axis = BatchAxis(0, outer if kind != "inner" else 1, inner if kind != "outer" else 1)
        shape = [axis.outer * batch * axis.inner, *rest]
    elif kind == "weight":
        shape, axis = [batch + 1, *rest], None
    x = torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    x = x * 10.0 ** draw(st.integers(-30, 30))
    for _ in range(draw(st.integers(0, 4))):
        if x.numel():
            value = draw(SPECIAL if draw(st.integers(0, 3)) else NONFINITE)
            x.view(-1)[draw(st.integers(0, x.numel() - 1))] = value
    if draw(st.booleans()) and x.dim() > 1:
        x = x.transpose(0, -1).contiguous().transpose(0, -1)
    return x, axis


@pytest.mark.parametrize("fmt", PLAIN)
@given(batch=batches(), first=st.integers(0, 2**40))
@settings(max_examples=40, deadline=None)
def test_the_compiled_quantizer_is_the_reference_bit_for_bit(
    fmt: str, batch: tuple[Tensor, BatchAxis | None], first: int
) -> None:
    x, axis = batch
    count = 1 if axis is None else x.shape[axis.dim] // (axis.outer * axis.inner)
    ids = torch.arange(first, first + count)
    wanted = quantize_values(x, fmt, KEY, ids, axis)
    got = quantize_compiled(x, fmt, KEY, ids, axis, -1)
    assert got.shape == wanted.shape and got.dtype == wanted.dtype
    assert torch.equal(got.isnan(), wanted.isnan())
    # Zeros count with their sign, so compare the bit patterns.
    assert torch.equal(got.nan_to_num().view(torch.int32), wanted.nan_to_num().view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("fmt", PLAIN)
def test_other_dtypes_are_the_reference_too(fmt: str, dtype: torch.dtype) -> None:
    x, ids = torch.randn(3, 33).to(dtype), torch.arange(3)
    got = quantize_compiled(x, fmt, KEY, ids, BatchAxis(0), -1)
    assert got.dtype == dtype and torch.equal(got, quantize_values(x, fmt, KEY, ids, BatchAxis(0)))


@pytest.mark.parametrize("outputs", ["none", "flow", "all"])
def test_whole_sites_agree_bit_for_bit(outputs: str) -> None:
    # The same products of the same rounded numbers: everything else is equal, so the results are.
    x = torch.randn(5, 3, 8, 8)
    grads = []
    for backend in ("compiled", "reference"):
        options = {"backend": backend, "inner": "eager", "quantize_outputs": outputs}
        model = dpq.compile(seeded(GroupNormNet), 1.0, **options)
        model(x).square().sum().backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    for ours, theirs in zip(*grads, strict=True):
        assert torch.equal(ours, theirs)


def test_threads_change_nothing() -> None:
    x, ids = torch.randn(7, 5000), torch.arange(7)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append(quantize_compiled(x, "luq_fp4", KEY, ids, BatchAxis(0), -1))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*results)


# The registry and the choice


def kernel(**changes: Any) -> Kernel:
    fields: dict[str, Any] = {"backend": "fast", "arithmetic": REFERENCE_SITE, "supports": lambda call, device: None}
    fields |= {"native": True, "reference": "reference", "priority": 99, "note": "a test's"}
    return Kernel(**(fields | changes))


@pytest.fixture
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(registry, "_KERNELS", dict(registry._KERNELS))
    choose_kernel.cache_clear()
    yield
    choose_kernel.cache_clear()


def call(recipe: str = "luq_fp4/none/auto", op: str = "linear") -> Any:
    return site_call(op, 0, 0, recipe, axis_list(BatchAxis(0), BatchAxis(0)))


@pytest.mark.usefixtures("_own_registry")
def test_the_registry_refuses_duplicates_and_unknown_references() -> None:
    for name in ("reference", "compiled", "auto"):
        with pytest.raises(RegistryError, match=f"'{name}' is already registered"):
            register_kernel(kernel(backend=name))
    with pytest.raises(RegistryError, match="its reference 'nowhere' is not registered"):
        register_kernel(kernel(reference="nowhere"))
    assert backend_names() == ("auto", "reference", "compiled", "cpu_int8")
    register_kernel(kernel())
    assert backend_names()[-1] == "fast"
    assert str(choose_kernel(call(), CPU)) == "fast (native)"


@pytest.mark.usefixtures("_own_registry")
def test_auto_takes_the_best_that_can_and_says_why_not_the_others() -> None:
    assert str(choose_kernel(call(), CPU)) == "cpu_int8 (native)"
    assert choose_kernel(call(), CPU).passed_over == ()
    flowing = choose_kernel(call("luq_fp4/flow/auto"), CPU)
    assert str(flowing) == "compiled (emulated)" and flowing.passed_over == (
        ("cpu_int8", "needs quantize_outputs='none', not 'flow'"),
    )
    blocked = choose_kernel(call(f"{BLOCKED[0]}/none/auto"), CPU)
    assert blocked.kernel.backend == "reference"
    assert [name for name, _ in blocked.passed_over] == ["cpu_int8", "compiled"] and "block" in blocked.passed_over[1][
        1
    ]
    elsewhere = choose_kernel(call(), torch.device("meta"))
    assert elsewhere.kernel.backend == "reference" and "meta" in elsewhere.passed_over[0][1]
    register_kernel(kernel(supports=lambda call, device: "too small" if call.op == "linear" else None))
    assert choose_kernel(call(), CPU).passed_over == (("fast", "too small"),)
    assert choose_kernel(site_call("conv1d", 0, 0, "luq_fp4/none/auto", [0, 1, 1] * 2, [1, 0, 1, 1]), CPU).kernel.native


def test_a_backend_that_cannot_is_an_error_with_its_reason() -> None:
    with pytest.raises(KernelError, match=r"no kernel runs linear.*block scales.*backend='auto'"):
        choose_kernel(call(f"{BLOCKED[0]}/none/compiled"), CPU)
    with pytest.raises(KernelError, match=r"no backend is named 'gpu'.*reference"):
        choose_kernel(call("luq_fp4/none/gpu"), CPU)


def test_compile_refuses_a_backend_that_cannot_run_the_format() -> None:
    with pytest.raises(KernelError, match="block scales"):
        dpq.compile(seeded(GroupNormNet), 1, backend="compiled", format=BLOCKED[0])


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"backend": "gpu"}, CompileSpecError, "backend='gpu' is none of auto, reference, compiled"),
        ({"inner": "tvm"}, CompileSpecError, "inner='tvm' is none of inductor, aot_eager, eager"),
        ({"format": "fp3"}, FormatError, "no format is named 'fp3'. Choose one of: luq_fp4"),
        ({"quantize_outputs": "some"}, CompileSpecError, "quantize_outputs='some' is none of 'none', 'flow', 'all'"),
        ({"recipe": "mine"}, CompileSpecError, "recipe='mine' is none of 'paper'"),
        ({"recipe": "paper", "format": "uniform4"}, CompileSpecError, "format='uniform4' contradicts"),
        ({"recipe": "paper", "quantize_outputs": "none"}, CompileSpecError, "quantize_outputs='none' contradicts"),
        ({"seed": 1.5}, CompileSpecError, "seed=1.5 is not an int"),
        ({"seed": True}, CompileSpecError, "seed=True is not an int"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_wrong_words_are_typed_errors(options: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error) as raised:
        dpq.compile(seeded(GroupNormNet), 1, **options)
    assert said in str(raised.value)


def test_the_paper_recipe_is_its_choices() -> None:
    x = torch.randn(3, 3, 8, 8)
    paper = dpq.compile(seeded(GroupNormNet), 1.0, recipe="paper", backend="reference")
    spelt = dpq.compile(
        seeded(GroupNormNet), 1.0, format="luq_fp4", quantize_outputs="all", backend="reference", recipe="paper"
    )
    other = dpq.compile(seeded(GroupNormNet), 1.0, backend="reference")
    grads = []
    for model in (paper, spelt, other):
        model(x).sum().backward()
        grads.append(model.stem.weight.grad)
    assert torch.equal(grads[0], grads[1]) and not torch.equal(grads[0], grads[2])
    assert "luq_fp4/all/reference" in repr(paper)


# The operators, by torch's own checks

CONV = ConvGeometry((1, 1), (1, 1), (1, 1), 1)


def sample_inputs(op: str, on: bool, bias: bool, outputs: str, channels_last: bool = False) -> tuple[Any, ...]:
    x = torch.randn((3, 2, 5, 5) if op == "conv2d" else (3, 4, 6), requires_grad=True)
    if channels_last:
        x = x.detach().to(memory_format=torch.channels_last).requires_grad_()
    weight = torch.randn((4, 2, 3, 3) if op == "conv2d" else (5, 6), requires_grad=True)
    offset = torch.randn(weight.shape[0], requires_grad=True) if bias else None
    geometry = geometry_list(CONV if op == "conv2d" else None)
    axes = axis_list(BatchAxis(0), BatchAxis(0))
    table = (torch.tensor([not on, on]), site_keys(0, 0, ("a", "b")), torch.arange(16))
    return (x, weight, offset, *table, op, 1, 0, geometry, axes, f"luq_fp4/{outputs}/reference")


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("on", [True, False], ids=["low", "full"])
@pytest.mark.parametrize("op", ["conv2d", "linear"])
def test_opcheck_of_the_switch(op: str, on: bool, bias: bool) -> None:
    for outputs in ("none", "all"):
        torch.library.opcheck(torch.ops.dpquant.site.default, sample_inputs(op, on, bias, outputs))


def test_opcheck_of_a_channels_last_conv() -> None:
    for on in (True, False):
        args = sample_inputs("conv2d", on, True, "none", channels_last=True)
        torch.library.opcheck(torch.ops.dpquant.site.default, args)
        y = torch.ops.dpquant.site(*args)
        assert y.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("name", ["site_grad_input", "site_grad_params"])
def test_opcheck_of_the_gradients(name: str) -> None:
    x, weight, _, *table, op, site, number, geometry, axes, recipe = sample_inputs("conv2d", True, True, "none")
    needs = (True, False) if name == "site_grad_params" else ()
    grad, x, weight = torch.randn(3, 4, 5, 5), x.detach(), weight.detach()
    args = (grad, x, weight, *table, *needs, op, site, number, geometry, axes, recipe)
    torch.library.opcheck(getattr(torch.ops.dpquant, name).default, args)
