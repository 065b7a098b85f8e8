"""Variants: compiled for one policy, they agree with the link table, share blocks, and change no state."""

import copy
import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dpquant_compile as dpq
from dpquant_compile import variants
from dpquant_compile.passes.capture import Tracer
from tests.support.models import BatchNormNet, GroupNormNet, seeded
from tests.support.steps import error, images, step

# Dynamo looks at the .grad of every input that it guards, also of those that the block before has computed.
pytestmark = [
    pytest.mark.slow,  # most compile several programs
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


def eager(make: Any = GroupNormNet, **options: Any) -> dpq.CompiledModule:
    """Compiled down to AOTAutograd's graphs: all of the machinery, without a C++ compiler."""
    model = dpq.compile(seeded(make), 1.0, inner="aot_eager", **options)
    step(model, images(4))
    return model


def two_linears() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 4), nn.Linear(4, 2))


def ragged() -> nn.Module:
    """Places, inputs and outputs whose numbers are no multiples of the 16 that share a scale."""
    layers = (nn.Conv2d(3, 5, 3, padding=1), nn.Flatten(), nn.Linear(5 * 64, 24), nn.Linear(24, 40), nn.Linear(40, 3))
    return nn.Sequential(*layers)


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


@pytest.mark.parametrize("make", [pytest.param(two_linears, marks=pytest.mark.heavy), ragged])
def test_variants_compiled_by_inductor_are_close_to_the_link_table(make: Any, runs: list[Any]) -> None:
    model = dpq.compile(seeded(make), 1.0)
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


def test_a_model_that_is_traced_beside_a_compilation_holds_nothing_of_it() -> None:
    """fx records the modules that any thread calls while it traces."""
    begun, other = threading.Event(), nn.Linear(4, 4)

    class Slow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            begun.wait(0.5)  # for the other thread to be at work, if it may
            time.sleep(0.2)
            return x.relu()

    def job() -> None:
        begun.set()
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline:
            other(torch.zeros(1, 4))

    worker = variants._Worker()
    done = worker.submit(job)
    traced = Tracer().trace(nn.Sequential(nn.Linear(4, 4), Slow()))
    done.result(5)
    assert [node.op for node in traced.nodes] == ["placeholder", "call_module", "call_method", "output"]
    worker._end()
