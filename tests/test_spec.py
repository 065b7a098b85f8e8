"""Models compiled with recipes: what runs at each side of the switch, in training, evaluation and analyses."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import dpquant_compile as dpq
from dpquant_compile.backends.cpu_int8 import build as native
from dpquant_compile.backends.ops.site import axis_list, site_call, static_arguments
from dpquant_compile.numerics.random_bits import site_keys
from dpquant_compile.numerics.recipe import HIGH, Precision, get_recipe, recipe_names
from dpquant_compile.privacy.schedule.probe import Probe
from dpquant_compile.sites import BatchAxis
from tests.support.models import GroupNormNet, seeded
from tests.support.private import clipped_sums, made_private, weights_like
from tests.support.private_loops import made
from tests.support.probes import STEP, batch_of, cross_entropy, ordered

IDS = [3, 17, 4, 1001, 8, 50, 0, 23]


class Net(nn.Module):
    """A conv, a linear over places and a head; images [B, 3, 8, 8] to 4 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.places = nn.Linear(64, 32)
        self.head = nn.Linear(8 * 32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.places(torch.relu(self.conv(x)).flatten(2))).flatten(1))


def compiled(recipe: Any = "int4", **options: Any) -> dpq.CompiledModule:
    given = {"budget": 2, "recipe": recipe, "backend": "reference", "inner": "eager", **options}
    return dpq.compile(seeded(Net), **given).train()


def images(count: int = 5) -> Tensor:
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(3))


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(x).square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("recipe", recipe_names())
def test_a_variant_is_the_model_bit_for_bit(recipe: str) -> None:
    x = images()
    for high in HIGH:
        for policy in ("none", ["conv", "head"], "all"):
            model = compiled(recipe, high=high)
            model.set_policy(policy)
            ours = gradients(model, x)
            variant = compiled(recipe, high=high).variant(policy)
            for a, b in zip(ours, gradients(variant, x), strict=True):
                assert torch.equal(a, b), (high, policy)


@pytest.mark.parametrize("recipe", recipe_names())
def test_low_precision_is_near_full_precision(recipe: str) -> None:
    """Judged by the signal to noise of the output; a wrong scale or a lost sign would be far off."""
    x, model = images(), compiled(recipe, budget=1.0)
    exact = seeded(Net)(x)
    noise = (model(x) - exact).square().mean() / exact.square().mean()
    assert 0 < noise < {"int8": 1e-3, "fp8": 1e-2, "paper": 2.0}.get(recipe, 0.1)


# The other side of the switch


def test_sites_that_are_not_low_run_in_what_high_says() -> None:
    x, plain = images(), seeded(Net)
    assert torch.equal(compiled(budget=0)(x), plain(x)), "float32 is the original"
    high, int8 = compiled(budget=0, high="int8"), compiled("int8", budget=1.0)
    for a, b in zip(gradients(high, x), gradients(int8, x), strict=True):
        assert torch.equal(a, b), "all sites high is the recipe int8 with all sites low"
    mixed = compiled(high="int8")
    mixed.set_policy(["conv"])
    assert not torch.equal(mixed(x), high(x)) and not torch.equal(mixed(x), compiled(budget=1.0)(x))


@pytest.mark.parametrize(("high", "other"), [("int8", Precision.HIGH), ("bfloat16", Precision.BFLOAT16)])
def test_evaluation_is_in_full_precision_whatever_high_says(high: str, other: Precision) -> None:
    x, plain = images(), seeded(Net)
    model = compiled(high=high).eval()
    assert torch.equal(model(x), plain(x))
    assert model._dispatcher.table.policy.tolist() == [Precision.FULL] * 3
    quantized = compiled(high=high, quantize_eval=True).eval()
    assert not torch.equal(quantized(x), plain(x))
    assert set(quantized._dispatcher.table.policy.tolist()) == {Precision.LOW, other}


class Half(nn.Module):
    """`Net` with the operands of outputs and input gradients rounded by hand, for autograd to differentiate."""

    def __init__(self) -> None:
        super().__init__()
        self.net = seeded(Net)

    def forward(self, x: Tensor) -> Tensor:
        net = self.net
        y = torch.relu(_Rounded.apply(x, net.conv.weight, net.conv.bias, True))
        y = torch.relu(_Rounded.apply(y.flatten(2), net.places.weight, net.places.bias, False))
        result: Tensor = _Rounded.apply(y.flatten(1), net.head.weight, net.head.bias, False)
        return result


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, conv: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.conv, near = conv, [part.bfloat16().double() for part in (x, weight)]
        sums = F.conv2d(*near, padding=1) if conv else F.linear(*near)
        return sums.bfloat16().float() + (bias[:, None, None] if conv else bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        near, wide = (grad.bfloat16().double(), weight.bfloat16().double()), (grad.double(), x.double())
        if ctx.conv:
            dx = torch.nn.grad.conv2d_input(x.shape, near[1], near[0], padding=1)
            dw = torch.nn.grad.conv2d_weight(wide[1], weight.shape, wide[0], padding=1)
            db = grad.sum((0, 2, 3))
        else:
            dx, db = near[0] @ near[1], grad.flatten(0, -2).sum(0)
            dw = wide[0].flatten(0, -2).t() @ wide[1].flatten(0, -2)
        return dx.bfloat16().float(), dw.float(), db, None


def _gradients_of(outputs: Tensor, model: nn.Module) -> list[Tensor]:
    return list(torch.autograd.grad(outputs, list(model.parameters()), weights_like([outputs], 5)[0]))


def test_bfloat16_is_rounding_by_hand_with_privacy_and_without() -> None:
    """Sums that lie between two numbers of bfloat16 may go either way, so norms are compared, not bits."""
    x, hand, exact = images(8), Half(), seeded(Net)
    model = compiled(high="bfloat16", budget=0)
    private, _, _ = made_private(seeded(Net), 8, policy="none", high="bfloat16", inner="eager", bound=1e6)  # clips none
    sums = list(clipped_sums(private, [x]).values())
    wanted, plain = _gradients_of(hand(x), hand), _gradients_of(exact(x), exact)
    assert len(sums) == len(wanted)
    for ours, total, other, full in zip(_gradients_of(model(x), model), sums, wanted, plain, strict=True):
        near, far = other.norm() * 2e-4, other.norm() * 1e-3
        assert (ours - other).norm() <= near and (total - other).norm() <= near
        assert (full - other).norm() > far or full.shape == (4,), "full precision is not as near"


def test_low_sites_are_the_same_whatever_runs_the_others() -> None:
    x = images(8)
    for backend in ("reference", "auto"):
        found = []
        for high in ("float32", "bfloat16"):
            model, _, _ = made_private(seeded(Net), 8, policy="all", high=high, backend=backend, inner="eager")
            found.append(clipped_sums(model, [x]))
        assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_backward_keeps_what_bfloat16_sites_read() -> None:
    """Inputs in float32 are freed where codes are read instead, and only there."""
    x = images(8)
    model, _, _ = made_private(seeded(Net), 8, policy="none", high="bfloat16", inner="eager")
    none = clipped_sums(model, [x])
    model.set_policy("all")
    clipped_sums(model, [x])  # frees the inputs of all sites
    model.set_policy("none")
    again = clipped_sums(model, [x])
    assert all(torch.equal(none[name], again[name]) for name in none)
    model.set_policy(["places"])
    mixed = clipped_sums(model, [x])
    assert all(value.isfinite().all() for value in mixed.values())
    assert any(not torch.equal(none[name], mixed[name]) for name in none)


@pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))
def test_bfloat16_beside_native_low_sites() -> None:
    model = compiled("int4", high="bfloat16", backend="auto")
    model.set_policy(["conv"])
    kernels = {row.site: (row.precision, row.kernel, row.native) for row in model.explain()}
    assert kernels["conv"] == ("low", "cpu_int8 (native)", True)
    assert kernels["head"] == ("bfloat16", "torch (bfloat16)", True)


def test_a_policy_changes_the_precision_and_compiles_nothing() -> None:
    model = compiled(high="bfloat16", inner="aot_eager", backend="reference")
    x = images()
    first = gradients(model, x)
    with torch.compiler.set_stance("fail_on_recompile"):
        for policy in ("none", "all", ["head"]):
            model.set_policy(policy)
            changed = gradients(model, x)
            assert any(not torch.equal(a, b) for a, b in zip(changed, first, strict=True))


def test_blocks_that_are_compiled_ahead_multiply_in_bfloat16_too() -> None:
    x, model = images(), compiled(high="bfloat16", inner="aot_eager")
    model.set_policy("none")
    wanted = gradients(model, x)
    model.precompile(["none"], background=False)
    with torch.compiler.set_stance("fail_on_recompile"):
        for a, b in zip(gradients(model, x), wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * float(b.abs().max()))
    assert len(model._variants) == 1


def test_private_sums_of_sites_that_are_high_are_those_of_int8() -> None:
    found = []
    for recipe, options, policy in (("int4", {"high": "int8"}, "none"), ("int8", {}, "all")):
        model, _, _ = made_private(seeded(Net), 8, policy=policy, recipe=recipe, inner="eager", **options)
        found.append(clipped_sums(model, [images(8)]))
    assert found[0] and all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))
@pytest.mark.parametrize("recipe", ["int4", "int4_w8", "int8", "luq"])
def test_private_sums_of_native_kernels_are_the_references(recipe: str) -> None:
    """Exact products of the same codes: what differs is float32's rounding of sums."""
    for policy in ("none", ["conv", "head"], "all"):
        found = []
        for backend in ("reference", "cpu_int8"):
            model, _, _ = made_private(
                seeded(Net), 8, policy=policy, recipe=recipe, high="int8", backend=backend, inner="eager"
            )
            found.append(clipped_sums(model, [images(8)]))
        for name, total in found[0].items():
            torch.testing.assert_close(found[1][name], total, rtol=1e-4, atol=1e-5 * float(total.abs().max()))


@pytest.mark.parametrize("recipe", recipe_names())
@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_operands_look_as_the_program_was_told_at_every_precision(recipe: str, backend: str) -> None:
    """One graph serves every policy, so shapes and strides must not depend on it."""
    x = torch.randn(4, 6, 8)
    for high in HIGH:
        numbers = f"{get_recipe(recipe).numbers}/none/{backend}" + ("" if high == "float32" else f"/{high}")
        call = site_call("linear", 0, 0, numbers, axis_list(BatchAxis(0), BatchAxis(0)))
        rest = {**static_arguments(call), "keys": site_keys(0, 0, ["a"]), "samples": torch.arange(4)}
        for precision in (Precision.FULL, Precision.LOW, call.recipe.other):
            policy = torch.tensor([precision], dtype=torch.uint8)
            real = torch.ops.dpquant.round_operand(x=x, policy=policy, role="input", **rest)
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                fake = torch.ops.dpquant.round_operand(x=mode.from_tensor(x), policy=policy, role="input", **rest)
            for a, b in zip(real, fake, strict=True):
                assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype), precision


def test_a_policy_that_changes_packs_the_weights_anew() -> None:
    """Low and high weights of one step are different; the one of the policy must be taken."""
    model, _, _ = made_private(seeded(Net), 8, policy="all", recipe="int4", high="int8", inner="eager")
    first = clipped_sums(model, [images(8)])
    model.set_policy("none")
    other = clipped_sums(model, [images(8)])
    model.set_policy("all")
    again = clipped_sums(model, [images(8)])
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_explain_names_the_recipe_its_operands_and_the_others_precision() -> None:
    model = compiled(high="int8", backend="auto")
    model.set_policy(["conv"])
    text = str(model.explain())
    assert "1 of 3 sites in int4, outputs 'none', the others in int8" in text
    assert "int4: input int4.nearest.channel; weight int4.nearest.block; output gradient int4.channel" in text
    assert [row.precision for row in model.explain()] == ["low", "int8", "int8"]
    nodes = model.graph_view().to_networkx().nodes.values()
    assert [node["precision"] for node in nodes if node["site"] is not None] == ["low", "int8", "int8"]
    assert model.extra_repr() == "1 of 3 sites in int4, the others in int8"
    assert compiled().extra_repr().endswith("in int4")


def test_explain_says_where_operands_are_transformed() -> None:
    assert "Hadamard transform of the operands of linears' weight gradients" in str(compiled("nvfp4").explain())
    assert "Hadamard" not in str(compiled("int4").explain())


def test_both_sides_run_by_one_kernel() -> None:
    """A program serves every policy, so low sites that no native kernel has keep the others from it, and it says so."""
    (row, *_) = compiled("fp8", high="int8", backend="auto", budget=3).explain()
    assert not row.native and "not cpu_int8: computes" in row.note


def test_a_checkpoint_of_another_recipe_is_refused() -> None:
    plain = made(model=seeded(Net), data=_data(), compile_options={"recipe": "int4"})
    for high in ("int8", "bfloat16"):
        one = made(model=seeded(Net), data=_data(), compile_options={"recipe": "int4", "high": high})
        with pytest.raises(dpq.errors.CheckpointError, match="recipe"):
            plain.engine.load_state_dict(one.engine.state_dict())


# Analyses


def test_analyses_measure_against_the_other_side() -> None:
    """The baseline of a probe is the model with no site low: in float32, in bfloat16, or in int8."""
    batch = ordered(batch_of(images(8), IDS))
    policies = [frozenset({"conv"}), frozenset()]
    losses = {}
    for high in HIGH:
        run = made(model=seeded(Net), data=_data(), compile_options={"recipe": "int4", "high": high, "inner": "eager"})
        run.model(images(2))
        losses[high] = Probe(run.engine.session, cross_entropy, STEP).differences(batch, policies)
        assert not losses[high][:, 1].any() and losses[high][:, 0].any()
    x, target = batch.args[0], batch.target
    for high in ("int8", "bfloat16"):
        low, base = (compiled(high=high, quantize_eval=True).eval() for _ in range(2))
        low.set_policy(["conv"])
        base.set_policy("none")
        expected = cross_entropy(low(x), target) - cross_entropy(base(x), target)
        torch.testing.assert_close(losses[high][:, 0], expected.detach(), rtol=1e-4, atol=2e-6)
        assert not torch.allclose(losses[high][:, 0], losses["float32"][:, 0], rtol=1e-3)


def _data() -> torch.utils.data.TensorDataset:
    return torch.utils.data.TensorDataset(images(24), torch.zeros(24, dtype=torch.int64))


def test_models_with_norms_train_by_every_recipe() -> None:
    x = torch.randn(4, 3, 8, 8)
    for recipe in recipe_names():
        model = dpq.compile(seeded(GroupNormNet), 1.0, recipe=recipe, backend="reference", inner="eager").train()
        assert all(grad.isfinite().all() for grad in gradients(model, x)), recipe


def test_a_copy_keeps_the_recipe() -> None:
    model = compiled("luq", high="int8")
    assert torch.equal(copy.deepcopy(model)(images()), model(images()))
