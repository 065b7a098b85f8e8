"""The compiled program: policies and batch sizes are data to it, variants replace it, torch.compile finds it."""

import copy
import random
import statistics
import time
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import dpquant_compile as dpq
from dpquant_compile import torchvision_compat
from tests.support.models import GroupNormNet, seeded
from tests.support.steps import error, images, step

# Dynamo looks at the .grad of every input that it guards, also of those that the block before has computed.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
Pair = tuple[nn.Module, dpq.CompiledModule]


def draws(model: dpq.CompiledModule, count: int) -> Iterator[list[str]]:
    rng, names = random.Random(0), model.sites.names
    return (rng.sample(names, rng.randint(0, len(names))) for _ in range(count))


@pytest.fixture(scope="session")
def small() -> Pair:
    original = seeded(GroupNormNet)
    model = dpq.compile(copy.deepcopy(original), 0.5)
    step(model, images(4))
    return original, model


@pytest.fixture(scope="session")
def resnet18() -> Pair:
    """torchvision's ResNet18 for images of 32×32, warmed up."""
    torch.manual_seed(0)
    original = torchvision_compat.models().resnet18(num_classes=10)
    model = dpq.compile(copy.deepcopy(original), 15)
    model.set_policy("none")
    step(model, images(4, 32))
    model.load_state_dict(original.state_dict())
    return original, model


# One program for all policies and batch sizes


def run_all(model: dpq.CompiledModule, policies: int, batches: list[int], size: int) -> None:
    graphs, seen, x = len(model.compiled_graphs), {}, images(2, size)
    with torch.compiler.set_stance("fail_on_recompile"):
        for policy in draws(model, policies):
            model.set_policy(policy)
            seen[model.policy] = model(x).sum().item()
        assert len(set(seen.values())) > len(seen) * 0.8, "policies give different results"
        for batch in batches:
            assert all(tensor.isfinite().all() for tensor in step(model, images(batch, size)))
    assert len(model.compiled_graphs) == graphs


@pytest.mark.slow
def test_policies_and_batch_sizes_compile_nothing(small: Pair) -> None:
    run_all(small[1], 200, list(range(2, 41)), 8)


@pytest.mark.heavy
def test_policies_and_batch_sizes_compile_nothing_resnet18(resnet18: Pair) -> None:
    run_all(resnet18[1], 200, [3, 40, 17], 32)
    resnet18[1].load_state_dict(resnet18[0].state_dict())


@pytest.mark.parametrize("size", [0, 1])
def test_tiny_batches_compile_nothing(small: Pair, size: int) -> None:
    with torch.compiler.set_stance("fail_on_recompile"):
        assert step(small[1], images(size))[0].shape == (size, 5)


def test_setting_a_policy_takes_less_than_a_millisecond(small: Pair) -> None:
    times = []
    for policy in draws(small[1], 200):
        times.append(-time.perf_counter())
        small[1].set_policy(policy)
        times[-1] += time.perf_counter()
    assert statistics.median(times) < 1e-3


def test_full_precision_is_the_original(small: Pair) -> None:
    small[1].set_policy("none")
    for batch in (4, 13):
        assert error(step(small[1], images(batch)), step(small[0], images(batch))) < 1e-5


@pytest.mark.heavy
def test_full_precision_is_the_original_resnet18(resnet18: Pair) -> None:
    original, model = resnet18
    model.set_policy("none")
    ours, theirs = (step(copy.deepcopy(original) if m is original else m, images(16, 32)) for m in (model, original))
    # BatchNorm over few numbers amplifies the last bits of what came before it.
    assert error(ours[:1], theirs[:1]) < 1e-5 and error(ours, theirs) < 1e-4


def test_low_precision_is_close_to_the_reference(small: Pair) -> None:
    reference = dpq.compile(copy.deepcopy(small[1]._original), 0.5, backend="reference")
    for policy in ("all", ["stem", "blocks.0.conv2"]):
        small[1].set_policy(policy), reference.set_policy(policy)
        reference._dispatcher.step = small[1].step
        ours, theirs = step(small[1], images(6)), step(reference, images(6))
        # Sums in another order may flip a rounding or two.
        assert statistics.median(error([a], [b]) for a, b in zip(ours, theirs, strict=True)) < 0.05
        assert error(ours[:1], step(small[0], images(6))[:1]) > 1e-3


def test_the_compiled_graphs_can_be_read(small: Pair) -> None:
    kinds = [graph.kind for graph in small[1].compiled_graphs]
    assert kinds[:2] == ["forward", "backward"]
    forward, backward = map(str, small[1].compiled_graphs[:2])
    assert forward.startswith("# forward") and forward.count("dpquant.site.default") == 6
    assert backward.startswith("# backward") and backward.count("dpquant.site_grad_params.default") == 6
    assert backward.count("dpquant.site_grad_input.default") == 5, "images need no gradient"


def test_a_batch_of_more_than_4096_compiles_nothing() -> None:
    model = dpq.compile(nn.Sequential(nn.Linear(4, 4)), 1, inner="aot_eager")
    step(model, torch.randn(8, 4))
    with torch.compiler.set_stance("fail_on_recompile"):
        step(model, torch.randn(5000, 4))


@pytest.mark.slow
def test_layers_can_be_frozen_one_by_one() -> None:
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(11)))
    model = dpq.compile(layers, 1, inner="aot_eager")
    for layer in list(layers)[:-1]:
        layer.requires_grad_(False)
        step(model, torch.randn(3, 4))


@pytest.mark.slow  # the import of peft
def test_adapters_that_are_merged_scaled_or_disabled_have_programs_of_their_own() -> None:
    torchvision_compat.models()  # before peft, which imports torchvision
    peft = pytest.importorskip("peft")
    original = peft.get_peft_model(nn.Sequential(nn.Linear(5, 3)), peft.LoraConfig(r=2, target_modules=["0"])).eval()
    layer = original.base_model.model[0]
    nn.init.normal_(layer.lora_B["default"].weight)
    model = dpq.compile(original, 0, backend="reference", inner="eager").eval()
    x = torch.randn(4, 5)
    shown = [model(x)]
    for change in (
        original.merge_adapter,
        original.unmerge_adapter,
        lambda: layer.set_scale("default", 3.0),
        original.disable_adapter_layers,
    ):
        change()
        torch.testing.assert_close(model(x), original(x))
        shown.append(model(x))
    torch.testing.assert_close(shown[1], shown[0])  # merged: the same sum, made once
    assert not any(torch.allclose(shown[0], other) for other in shown[3:])
