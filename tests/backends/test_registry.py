"""Kernels: the registry, and the choice among them."""

from typing import Any

import pytest
import torch

import dpquant_compile as dpq
from dpquant_compile.backends import registry
from dpquant_compile.backends.ops.site import axis_list, site_call
from dpquant_compile.backends.reference.emulated import REFERENCE_SITE
from dpquant_compile.backends.registry import Kernel, backend_names, choose_kernel, register_kernel
from dpquant_compile.errors import CompileSpecError, FormatError, KernelError, RegistryError
from dpquant_compile.numerics.formats import format_names, get_format
from dpquant_compile.sites import BatchAxis
from tests.support.models import GroupNormNet, seeded

BLOCKED = [name for name in format_names() if get_format(name).block is not None]
CPU = torch.device("cpu")

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
    assert backend_names() == ("auto", "reference", "compiled", "cpu_int8", "triton")
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
        ("triton", "the interpreter runs where backend='triton' asks for it"),
    )
    blocked = choose_kernel(call(f"{BLOCKED[0]}/none/auto"), CPU)
    assert blocked.kernel.backend == "reference"
    assert [name for name, _ in blocked.passed_over] == ["cpu_int8", "triton", "compiled"]
    assert "block" in blocked.passed_over[2][1]
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
        ({"inner": "tvm"}, CompileSpecError, "inner='tvm' is none of inductor, regions, aot_eager, eager"),
        ({"format": "fp3"}, FormatError, "no format is named 'fp3'. Choose one of: luq_fp4"),
        ({"quantize_outputs": "some"}, CompileSpecError, "quantize_outputs='some' is none of 'none', 'flow', 'all'"),
        ({"recipe": "mine"}, CompileSpecError, "recipe='mine' is none of int4, int4_w8, int8"),
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
    assert "sites in paper" in repr(paper) and "sites in int4" in repr(other)
