"""Models compiled with recipes: what runs at each side of the switch, in training, evaluation and analyses."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import dpquant_compile as dpq
from dpquant_compile.backends.cpu_int8 import build as native
from dpquant_compile.backends.ops.site import axis_list, site_call, static_arguments
from dpquant_compile.numerics.random_bits import site_keys
from dpquant_compile.numerics.recipe import Precision, get_recipe, recipe_names
from dpquant_compile.privacy.schedule.probe import Probe
from dpquant_compile.sites import BatchAxis
from tests.support.models import GroupNormNet, seeded
from tests.support.private import clipped_sums, made_private
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
    for high in ("float32", "int8"):
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


def test_evaluation_is_in_full_precision_whatever_high_says() -> None:
    x, plain = images(), seeded(Net)
    model = compiled(high="int8").eval()
    assert torch.equal(model(x), plain(x))
    assert model._dispatcher.table.policy.tolist() == [Precision.FULL] * 3
    quantized = compiled(high="int8", quantize_eval=True).eval()
    assert not torch.equal(quantized(x), plain(x))
    assert set(quantized._dispatcher.table.policy.tolist()) == {Precision.LOW, Precision.HIGH}


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
    for high in ("float32", "int8"):
        numbers = f"{get_recipe(recipe).numbers}/none/{backend}" + ("" if high == "float32" else "/int8")
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
    one = made(model=seeded(Net), data=_data(), compile_options={"recipe": "int4", "high": "int8"})
    other = made(model=seeded(Net), data=_data(), compile_options={"recipe": "int4"})
    with pytest.raises(dpq.errors.CheckpointError, match="recipe"):
        other.engine.load_state_dict(one.engine.state_dict())


# Analyses


def test_analyses_measure_against_the_other_side() -> None:
    """The baseline of a probe is the model with no site low: in float32, or in int8."""
    batch = ordered(batch_of(images(8), IDS))
    policies = [frozenset({"conv"}), frozenset()]
    losses = {}
    for high in ("float32", "int8"):
        run = made(model=seeded(Net), data=_data(), compile_options={"recipe": "int4", "high": high, "inner": "eager"})
        run.model(images(2))
        losses[high] = Probe(run.engine.session, cross_entropy, STEP).differences(batch, policies)
        assert not losses[high][:, 1].any() and losses[high][:, 0].any()
    low, base = compiled(high="int8", quantize_eval=True).eval(), compiled(high="int8", quantize_eval=True).eval()
    low.set_policy(["conv"])
    base.set_policy("none")
    x, target = batch.args[0], batch.target
    expected = cross_entropy(low(x), target) - cross_entropy(base(x), target)
    torch.testing.assert_close(losses["int8"][:, 0], expected.detach(), rtol=1e-4, atol=2e-6)
    assert not torch.allclose(losses["int8"][:, 0], losses["float32"][:, 0], rtol=1e-3)


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
