"""The torch.compile backend: found by its entry point, one session for each program, batches of any size."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

import dpquant_compile as dpq
from dpquant_compile.torch_compile import CompiledHandle

# Dynamo looks at the .grad of every input that it guards, also of those that the block before has computed.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

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
    return [session for session in dpq.sessions() if session not in before]


def test_a_graph_break_makes_two_sessions() -> None:
    assert [session.sites.names for session in new_sessions(Broken())] == [("first",), ("second",)]


def test_models_that_dynamo_runs_by_one_program_share_a_session() -> None:
    assert len(new_sessions(nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4)))) == 1


@pytest.mark.parametrize("attribute", [False, True])
def test_torch_compile_finds_the_batch(attribute: bool) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.table = nn.Linear(4, 4), torch.randn(5, 4)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            bias = 2 * (self.table if attribute else mask)  # used before the batch is
            return self.fc(x + bias)

    torch._dynamo.reset()
    original = Masked()
    compiled = torch.compile(original, backend="dpquant", options={"budget": 1, "inner": "eager"})
    mask = torch.randn(5, 4)
    for batch in range(2, 13):
        x = torch.randn(batch, 5, 4)
        assert not torch.equal(compiled(x, mask), original(x, mask)), f"batch {batch} was not quantized"
    # One for the first size, one for any size, and two about the size that the mask has as well.
    assert len(dpq.sessions()[-1].graphs) <= 4, "a new batch size must not compile again and again"
