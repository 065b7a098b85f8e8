"""The compiled program: policies and batch sizes are data to it, variants replace it, torch.compile finds it."""

import copy
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from models import BatchNormNet, GroupNormNet, seeded
from torch import Tensor, nn

import dpquant_compile as dpq
from dpquant_compile import torchvision_compat, variants
from dpquant_compile.torch_compile import CompiledHandle

# Dynamo looks at the .grad of every input that it guards, also of those that the block before has computed.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
Pair = tuple[nn.Module, dpq.CompiledModule]


def images(batch: int, size: int = 8, seed: int = 0) -> Tensor:
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(seed))


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Output and gradients of one training step."""
    model.zero_grad()
    out = model(x)
    (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
    return [out.detach(), *(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None)]


def error(got: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest difference, relative to the scale of each tensor."""
    assert len(got) == len(wanted)
    return max(((a - b).norm() / (b.norm() + 1e-12)).item() for a, b in zip(got, wanted, strict=True))


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


def test_policies_and_batch_sizes_compile_nothing(small: Pair) -> None:
    run_all(small[1], 200, list(range(2, 41)), 8)


@pytest.mark.slow
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


@pytest.mark.slow
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


def test_layers_can_be_frozen_one_by_one() -> None:
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(11)))
    model = dpq.compile(layers, 1, inner="aot_eager")
    for layer in list(layers)[:-1]:
        layer.requires_grad_(False)
        step(model, torch.randn(3, 4))


# Variants


def eager(make: Any = GroupNormNet, **options: Any) -> dpq.CompiledModule:
    """Compiled down to AOTAutograd's graphs: all of the machinery, without a C++ compiler."""
    model = dpq.compile(seeded(make), 1.0, inner="aot_eager", **options)
    step(model, images(4))
    return model


def two_linears() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 4), nn.Linear(4, 2))


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    seen: list[Any] = []
    call = variants._Variant.__call__

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(self)
        return call(self, *args, **kwargs)

    monkeypatch.setattr(variants._Variant, "__call__", counted)
    return seen


def test_variants_run_instead_of_the_link_table_and_agree_with_it(runs: list[Any]) -> None:
    model = eager(backend="reference")
    policies = ["all", ["blocks.0.conv1", "blocks.0.conv2"], "none"]
    wanted = []
    for policy in policies:
        model.set_policy(policy)
        wanted.append(step(model, images(4)))
    done = model.precompile(policies[:2], background=False)
    assert done.done and len(model._variants) == 2 and not runs
    for policy, before in zip(policies, wanted, strict=True):
        model.set_policy(policy)
        assert all(torch.equal(a, b) for a, b in zip(step(model, images(4)), before, strict=True))
    assert len(runs) == 2
    model.set_policy("all")
    model.eval()
    model(images(4))
    assert len(runs) == 2, "eval() is full precision"
    model.train()
    for batch in (3, 1):
        step(model, images(batch))
    assert len(runs) == 3, "batches of 0 and 1 run uncompiled"


def test_equal_blocks_are_compiled_once() -> None:
    model = eager()
    model.precompile(["all"], background=False)
    assert model._variants.blocks == 3, "stem, residual block, head"
    model.precompile(["none", ["blocks.0.conv1", "blocks.0.conv2", "fc"], "all"], background=False)
    assert model._variants.blocks == 6 and len(model._variants) == 3


def test_the_least_recently_used_variant_is_dropped(runs: list[Any]) -> None:
    model = eager(two_linears)
    model._variants.limit = 2
    model.precompile(["all", "none"], background=False)
    model.set_policy("all")
    model(images(4))
    model.precompile(["1"], background=False)
    assert len(model._variants) == 2 and len(runs) == 1
    for policy, ran in (("none", 1), ("all", 2), ("1", 3)):
        model.set_policy(policy)
        model(images(4))
        assert len(runs) == ran


class Dropping(BatchNormNet):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.dropout(x, 0.5, self.training))


def test_precompiling_changes_no_state() -> None:
    model = eager(Dropping)
    before = copy.deepcopy((model.state_dict(), [parameter.grad for parameter in model.parameters()]))
    rng, count = torch.random.get_rng_state(), model.step
    model.precompile(["all"], background=True).wait(120)
    after = (model.state_dict(), [parameter.grad for parameter in model.parameters()])
    assert torch.equal(torch.random.get_rng_state(), rng) and model.step == count
    assert all(torch.equal(before[0][name], after[0][name]) for name in after[0])
    assert all(torch.equal(a, b) for a, b in zip(before[1], after[1], strict=True))


def test_precompiling_beside_the_training_changes_nothing() -> None:
    results = []
    for ahead in (False, True):
        model = eager(two_linears, backend="reference")
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        policies = ["all", "none", "1", "2"]
        running = model.precompile(policies, background=True) if ahead else None
        for number in range(24):
            model.set_policy(policies[number % 4])
            step(model, images(4 + number % 3, seed=number))
            optimizer.step()
        if running is not None:
            running.wait(120)
            assert len(model._variants) == 4
        results.append([parameter.detach() for parameter in model.parameters()])
    assert error(results[1], results[0]) < 1e-4


def test_variants_compiled_by_inductor_are_close_to_the_link_table(runs: list[Any]) -> None:
    model = dpq.compile(seeded(two_linears), 1.0)
    wanted = step(model, images(6))
    model.precompile(["all"]).wait(200)
    assert error(step(model, images(6)), wanted) < 0.01, "under 40 dB"
    assert len(runs) == 1


def test_a_variant_is_compiled_before_it_is_used() -> None:
    model = eager()
    model.precompile(["all"], background=False)
    model.set_policy("all")
    with torch.compiler.set_stance("fail_on_recompile"):
        step(model, images(4))


def test_variants_serve_all_batch_sizes() -> None:
    model = eager()
    model.precompile(["all"], background=False)
    model.set_policy("all")
    step(model, images(4))
    with torch.compiler.set_stance("fail_on_recompile"):
        for batch in (2, 7, 40):
            step(model, images(batch))


def test_precompiling_needs_a_batch() -> None:
    model = dpq.compile(seeded(GroupNormNet), 1)
    with pytest.raises(dpq.errors.NotCapturedError, match="run the model once"):
        model.precompile(["all"])
    with pytest.raises(dpq.errors.SiteError, match="nowhere"):
        model.precompile([["nowhere"]])


def test_variants_made_after_an_evaluation_serve_the_training(runs: list[Any]) -> None:
    model = eager(BatchNormNet)
    model.eval()
    model(images(4))
    model.train()
    model.precompile(["all"], background=False)
    model.set_policy("all")
    step(model, images(4))
    assert len(runs) == 1


# torch.compile(backend="dpquant")

PROGRAM = """
import sys, torch
from torch import nn
import torch._dynamo
def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
x = torch.linspace(-1, 1, 30).view(5, 6)
assert "dpquant_compile" not in sys.modules
for inner in ("eager", "aot_eager", "inductor"):
    torch._dynamo.reset()
    plain, model = make(), make()
    run = torch.compile(model, backend="dpquant", options={"budget": 2, "seed": 1, "inner": inner})
    low = run(x)
    low.sum().backward()
    import dpquant_compile as dpq
    session = dpq.sessions()[-1]
    assert [s.name for s in session.sites] == ["0", "2"], session.sites.names
    assert str(session.policy) == "all" and not torch.equal(low, plain(x))
    with torch.compiler.set_stance("fail_on_recompile"):
        session.set_policy("none")
        full = run(x)
        assert torch.allclose(full, plain(x), atol=1e-6)
        model.zero_grad(); full.sum().backward(); plain(x).sum().backward()
        assert torch.allclose(model[0].weight.grad, plain[0].weight.grad, atol=1e-5)
        session.set_policy("all")
        assert torch.allclose(run(x), low, atol=1e-5)
    with torch.no_grad():
        assert torch.allclose(run(x), plain(x), atol=1e-6), "no_grad() is full precision"
    for batch in (3, 9, 2):
        assert run(x.repeat(2, 1)[:batch]).shape == (batch, 3)
    assert inner == "eager" or "dpquant.site" in str(session.compiled_graphs[0])
    assert "2 of 2 sites" in str(session.explain())
    del run, session
for options in (None, {}, {"budget": 1, "colour": 3}, {"budget": 1, "inner": "tvm"}, {"budget": 7}):
    torch._dynamo.reset()
    try:
        torch.compile(make(), backend="dpquant", options=options)(x)
    except Exception as error:
        chain = [error]
        while chain[-1].__cause__ or chain[-1].__context__:
            chain.append(chain[-1].__cause__ or chain[-1].__context__)
        named = [type(e).__name__ for e in chain] + [str(e) for e in chain]
        assert any("CompileSpecError" in n or "BudgetError" in n for n in named), named
    else:
        raise AssertionError(f"accepted {options}")
print("fine")
"""


@pytest.mark.slow
def test_torch_compile_finds_the_backend_by_its_entry_point() -> None:
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.stdout.strip() == "fine", done.stderr[-3000:]


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


def new_sessions(*models: nn.Module) -> list[CompiledHandle]:
    torch._dynamo.reset()
    before, options = dpq.sessions(), {"budget": 1.0, "inner": "aot_eager", "backend": "reference"}
    calls = [torch.compile(model, backend="dpquant", options=options) for model in models]
    for call in calls:
        call(torch.randn(3, 4)).sum().backward()
    return [handle for handle in dpq.sessions() if handle not in before]


def test_a_graph_break_makes_two_sessions() -> None:
    assert [session.sites.names for session in new_sessions(Broken())] == [("first",), ("second",)]


def test_models_that_dynamo_runs_by_one_program_share_a_session() -> None:
    assert len(new_sessions(nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4)))) == 1
