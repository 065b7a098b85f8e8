"""Ways in which one sample could touch another, or a graph could stand for another model. Each was a fault once."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dpquant_compile as dpq
from dpquant_compile.errors import BudgetError, CaptureError, CompileSpecError


class Reshape(nn.Module):
    """Writes a size as a number, so that samples and positions change places."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.before, self.fc = kind, nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        if self.kind == "number":
            return self.fc(x.reshape(7, -1, 4)).reshape(x.shape)
        if self.kind == "strided":
            turned = x.transpose(0, 1)
            return self.fc(turned.as_strided(turned.shape, (x.shape[0] * 4, 4, 1))).reshape(x.shape)
        if self.kind == "turned":
            return self.fc(x.transpose(0, 1)).transpose(0, 1)
        return self.fc(x.reshape(-1, 4)).reshape(x.shape)


def outputs_with_and_without_outlier(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    outlier = torch.cat([x, 1e4 * torch.ones_like(x[:1])])
    return model(x), model(outlier)[: len(x)]


@pytest.mark.parametrize("kind", ["number", "strided", "turned", "folded"])
@pytest.mark.parametrize("batch", [3, 6, 7])
def test_an_outlier_moves_no_other_sample(kind: str, batch: int) -> None:
    torch.manual_seed(0)
    model = dpq.compile(Reshape(kind), budget=1.0, backend="reference")
    x = torch.randn(batch, 7, 4)
    model(x)
    model.set_policy("all")
    alone, beside = outputs_with_and_without_outlier(model, x)
    plain, plain_beside = outputs_with_and_without_outlier(model._original, x)
    if torch.equal(plain, plain_beside):  # else the model itself mixes samples
        assert torch.equal(alone, beside)
    expected = ("before", "fc") if kind in ("turned", "folded") else ("before",)
    assert model.sites.names == expected
    assert [skip.name for skip in model.sites.skipped] == [n for n in ("fc",) if n not in expected]


def test_sequence_first_attention_is_refused() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = nn.MultiheadAttention(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.attn(x, x, x, need_weights=False)[0]

    with pytest.raises(CaptureError, match=r"attn.in_proj.*batch_first=True"):
        dpq.compile(Encoder(), budget=1, backend="reference")(torch.randn(5, 3, 8))


def test_a_variant_runs_only_where_its_samples_lie() -> None:
    model = dpq.compile(Reshape("folded"), budget=2, backend="reference")
    early = model.variant("all")
    with pytest.raises(CaptureError, match=r"variant\(policy\) again"):
        early(torch.randn(3, 6, 4))
    late, x = model.variant("all"), torch.randn(3, 6, 4)
    model.set_policy("all")
    assert torch.equal(late(x), model(x))
    with pytest.raises(CaptureError, match=r"variant\(policy\) again"):
        late(torch.randn(3, 5, 4))


class Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None, twice: bool = False) -> Tensor:
        y = self.b(self.a(x)) if mask is None else self.a(x) * mask
        return 2 * y if twice else y


def test_optional_arguments_take_their_own_branch() -> None:
    original = Optional()
    model = dpq.compile(original, budget=0, backend="reference")
    x, mask = torch.randn(3, 4), torch.rand(3, 4)
    for kwargs in (
        {},
        {"mask": mask},
        {"mask": None},
        {"twice": True},
        {"mask": mask, "twice": True},
        {"twice": False},
    ):
        assert torch.equal(model(x, **kwargs), original(x, **kwargs)), kwargs
    assert torch.equal(model(x, mask, True), original(x, mask, True))


def test_a_trace_that_computes_something_else_is_not_used() -> None:
    class Careful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) if isinstance(x, Tensor) else self.b(x)

    original = Careful()
    model = dpq.compile(original, budget=0, backend="reference")
    x = torch.randn(3, 4)
    assert torch.equal(model(x), original(x))


def test_the_check_of_a_trace_leaves_nothing_changed() -> None:
    original = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    model = dpq.compile(original, budget=1, backend="reference")
    x = torch.randn(6, 4)
    state = torch.random.get_rng_state()
    model.capture(x)
    assert torch.equal(state, torch.random.get_rng_state())
    assert int(original[1].num_batches_tracked) == 0 and not original[1].running_mean.any()


def test_sites_of_another_mode_join() -> None:
    class Auxiliary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.aux = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) + self.aux(x) if self.training else self.fc(x)

    original = Auxiliary().eval()
    model = dpq.compile(original, budget=1.0, backend="reference")
    x = torch.randn(3, 4)
    model(x)
    model.train()
    model(x)
    model.set_policy("all")
    assert model.sites.names == ("fc", "aux")
    assert not torch.equal(model(x), original.fc(x) + original.aux(x))
    assert {row.site: row.precision for row in model.explain()} == {"fc": "low", "aux": "low"}


def test_a_replaced_layer_is_used() -> None:
    model = dpq.compile(nn.Sequential(nn.Linear(4, 4)), budget=0, backend="reference")
    x = torch.randn(3, 4)
    model(x)
    model._original[0] = nn.Linear(4, 2)
    assert model(x).shape == (3, 2)


def test_sample_ids_make_bits_independent_of_the_place() -> None:
    model = dpq.compile(nn.Sequential(nn.Linear(16, 4)), budget=1, backend="reference")
    x, ids = torch.randn(6, 16), torch.tensor([11, 5, 7, 2, 90, 4])
    model.sample_ids = ids
    whole = model(x)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    model.sample_ids = ids[order]
    assert torch.equal(model(x[order]), whole[order])
    model.sample_ids = ids[2:]
    assert torch.equal(model(x[2:]), whole[2:])
    with pytest.raises(CompileSpecError, match="one id per sample"):
        model(x)
    model.sample_ids = None
    assert not torch.equal(model(x), whole)


@pytest.mark.parametrize("policy", ["none", "all"])
def test_autocast_around_a_model(policy: str) -> None:
    model = dpq.compile(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), budget=2, backend="reference")
    model.set_policy(policy)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(torch.randn(4, 8))
    y.float().sum().backward()
    assert y.dtype == torch.float32 and all(p.grad is not None for p in model.parameters())


def test_a_model_that_only_dynamo_takes_and_that_declares_no_layer() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.w) if x.sum().numel() and x.shape[1] == 4 and not isinstance(x, nn.Module) else x

    model = dpq.compile(Functional(), budget=1.0, backend="reference", example_inputs=(torch.randn(3, 4),))
    assert model.sites.names == ("w",)
    with pytest.raises(BudgetError, match="between 0 and 0"):
        dpq.compile(Functional(), budget=-1, backend="reference")


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
