"""verify_isolation refuses what lets one sample reach another, says where and what to do, and takes what does not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from dpquant_compile import pipeline
from dpquant_compile.errors import CaptureError, IsolationError
from dpquant_compile.passes.batch.verify_isolation import verify_isolation
from dpquant_compile.sites import BatchAxis
from tests.support.models import BatchNormNet, Counting, Hooked, canonical, proved, state, traced

B = 6


def meta(gm: fx.GraphModule, name: str) -> tuple[bool, BatchAxis | None, BatchAxis | None]:
    node = next(node for node in gm.graph.nodes if node.name == name)
    return node.meta["batched"], node.meta["batch_axis"], node.meta.get("expanded_batch")


class Of(nn.Module):
    """A function of (self, a batch [B, 5, 4] that a linear has seen), with some state to use."""

    def __init__(self, function: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.function = nn.Linear(4, 4), function
        self.token, self.table = nn.Parameter(torch.randn(1, 1, 4)), nn.Parameter(torch.randn(3, 4))
        self.register_buffer("running", torch.zeros(4))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        return self.function(self, self.fc(x))


def mixes(model: nn.Module, x: Tensor) -> bool:
    """Whether a change of one sample changes an output of another, or what the model keeps."""
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def run(value: Tensor, i: int) -> list[Tensor]:
        model.load_state_dict(kept)
        output = model(value).detach()
        others = torch.cat((output[:i], output[i + 1 :])) if output.shape[:1] == x.shape[:1] else output
        return [others, *state(model).values()]

    def differs(i: int, row: Tensor) -> bool:
        changed = torch.cat((x[:i], row[None], x[i + 1 :]))
        return not all(torch.equal(a, b) for a, b in zip(run(x, i), run(changed, i), strict=True))

    return any(differs(i, row) for i in (0, 1, len(x) - 1) for row in (1e3 * x[i], -1e3 * x[i], x[i] * float("nan")))


def batch() -> Tensor:
    return torch.randn(B, 5, 4, generator=torch.Generator().manual_seed(1))


def _writes(s: Of, x: Tensor) -> Tensor:
    s.running.mul_(0.9).add_(x.detach().mean((0, 1)))
    return x


def _writes_view(s: Of, x: Tensor) -> Tensor:
    s.running[:2].copy_(x.detach()[0, 0, :2])
    return x


def _zeroes_one(s: Of, x: Tensor) -> Tensor:
    y = x.clone()
    y[0] = x[1]
    return y


# What mixes samples: the function, and words of the message beside node, source line and fix.
REFUSED: dict[str, tuple[Callable[[Of, Tensor], Any], str]] = {
    "centre": (lambda s, x: x - x.mean(0), "aten.mean reduces over the batch"),
    "scale": (lambda s, x: x / x.abs().max(), "aten.max reduces over the batch"),
    "std": (lambda s, x: x / x.std(), "aten.std reduces"),
    "var": (lambda s, x: x - x.var(0, keepdim=True), "aten.var reduces"),
    "norm": (lambda s, x: x / x.norm(), "aten.linalg_vector_norm reduces"),
    "amax": (lambda s, x: x - x.amax((0, 2), keepdim=True), "aten.amax reduces"),
    "quantile": (lambda s, x: x - x.quantile(0.5), "aten.sort runs over the batch"),
    "softmax": (lambda s, x: x.softmax(0), "aten._softmax runs over the batch"),
    "log_softmax": (lambda s, x: x.log_softmax(0), "aten._log_softmax runs over the batch"),
    "sort": (lambda s, x: x.sort(0)[0], "aten.sort runs over the batch"),
    "topk": (lambda s, x: x * x.topk(1, 0)[0], "aten.topk runs over the batch"),
    "cumsum": (lambda s, x: x.cumsum(0), "aten.cumsum runs over the batch"),
    "flip": (lambda s, x: x.flip(0), "aten.flip runs over the batch"),
    "roll": (lambda s, x: x.roll(1, 0), "aten.roll runs over the batch"),
    "max": (lambda s, x: x - x.max(0)[0], "aten.max reduces over the batch"),
    "sum": (lambda s, x: x.sum(), "one row per sample.*criterion given to make_private"),
    "gram": (lambda s, x: (x.flatten(1) @ x.flatten(1).t()) @ x.flatten(1), "multiplies samples with each other"),
    "permutation": (lambda s, x: x[torch.tensor([1, 0, 2, 3, 4, 5])], "aten.index picks samples"),
    "gather": (lambda s, x: x.gather(0, (x > 0).long()), "aten.gather picks across samples"),
    "pick by one": (lambda s, x: x[:, (x[0, :, 0] > 0).long()], "one sample is picked"),
    "pick by all": (lambda s, x: x.mean(2)[:, (x[:, 0, 0] > 0).long()], "picks from one sample what another"),
    "fold and reduce": (lambda s, x: x - x.reshape(-1, 4).mean(0), "aten.mean reduces over the batch"),
    "fold and split": (lambda s, x: x.reshape(5, -1, 4).mean(1), "splits the batch"),
    "conv over the batch": (lambda s, x: F.conv1d(x.permute(2, 1, 0), torch.ones(5, 5, 1)), "batch is elsewhere"),
    "layer norm": (lambda s, x: F.layer_norm(x.permute(1, 2, 0), x.shape[:1]), "normalises over the batch"),
    "group norm": (lambda s, x: F.group_norm(x.transpose(0, 1), 1).transpose(0, 1), "the batch is elsewhere"),
    "batch norm": (lambda s, x: F.batch_norm(x.mT, None, None, training=True), r"replace_batch_norm\(model\) before"),
    "loss": (lambda s, x: F.cross_entropy(x.mT, x.argmax(2)), "return the logits.*criterion given to make_private"),
    "attention": (lambda s, x: F.scaled_dot_product_attention(*[x.transpose(0, 1)] * 3), "multiplies samples"),
    "where": (lambda s, x: torch.where(x.mean() > 0, x, -x), "aten.mean reduces"),
    "one written": (_zeroes_one, "one sample is picked"),
    "fill one": (lambda s, x: x.index_fill(0, torch.tensor([0]), 0.0), "fills chosen samples"),
    "write": (_writes, "aten.mean reduces over the batch.*'running'.*do not keep data of samples"),
    "write view": (_writes_view, "one sample is picked.*'running'"),
    "place": (lambda s, x: x + torch.eye(6)[:, :1, None], "a row of its own for each place"),
    "no rule": (lambda s, x: torch.linalg.pinv(x), "no rule follows.*register_batch_rule"),
}  # fmt: skip


# These change with the place in the batch, or are refused for what they might do.
NOT_SEEN = {"place", "no rule", "fill one"}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    function, words = REFUSED[name]
    with pytest.raises(IsolationError, match=rf"node '\w+' \(test_verify_isolation.py:\d+: .*aten.*{words}") as error:
        proved(Of(function), batch())
    assert "Fix: " in str(error.value)
    assert name in NOT_SEEN or mixes(Of(function), batch()), "the refusal must not be vacuous"


def test_places_in_the_batch_are_no_values() -> None:
    for function in (
        lambda s, x: x + torch.arange(x.shape[0])[:, None, None],
        lambda s, x: torch.cat((x, torch.arange(x.shape[0]).view(-1, 1, 1).expand(-1, 1, 4)), 1),
        lambda s, x: x[torch.arange(x.shape[0]), torch.arange(x.shape[0]) % 5],
        lambda s, x: torch.stack((x[:, 0, 0], torch.arange(x.shape[0]) * 1.0), 1),
    ):
        with pytest.raises(IsolationError, match="a constant has a row of its own for each place"):
            proved(Of(function), batch())


def test_a_batch_is_not_a_number() -> None:
    gm = canonical(Of(lambda s, x: x * x.max().item()))
    with pytest.raises(IsolationError, match=r"node 'item'.*become a number or a size.*torch.where"):
        verify_isolation(gm, args=(batch(),), kwargs={})


def _padded(s: Of, x: Tensor) -> Tensor:
    y = x.new_zeros(x.shape[0], 5, 8)
    y[:, :, 2:6] = x
    return y


def _counts(s: Of, x: Tensor) -> Tensor:
    s.calls.add_(1)
    return x + s.calls


ACCEPTED: dict[str, Callable[[Of, Tensor], Any]] = {
    "within a sample": lambda s, x: (x - x.mean((1, 2), keepdim=True)) / x.flatten(1).std(1)[:, None, None],
    "softmax": lambda s, x: x.softmax(1) + x.cumsum(2) + x.sort(-1)[0],
    "class token": lambda s, x: torch.cat((s.token.expand(x.shape[0], -1, -1), x), 1),
    "repeated token": lambda s, x: torch.cat((s.token.repeat(x.shape[0], 1, 1), x), 1) * 2,
    "zeros": lambda s, x: torch.cat((x.new_zeros(x.shape[0], 1, 4) + s.token, x), 1),
    "zeros of its own": lambda s, x: torch.cat((torch.zeros_like(x[:, :1]), x), 1),
    "table": lambda s, x: s.table[(x[:, :, 0] > 0).long()] + F.embedding((x[:, :, 1] > 0).long(), s.table),
    "own row": lambda s, x: x[torch.arange(x.shape[0]), x[:, :, 0].argmax(1)],
    "constant index": lambda s, x: x[:, torch.tensor([0, 2, 2])],
    "own gather": lambda s, x: x.gather(1, x.argsort(1)),
    "one hot": lambda s, x: F.one_hot(x.argmax(2), 4) * x,
    "learned queries": lambda s, x: F.scaled_dot_product_attention(
        s.token.expand(x.shape[0], 2, 4)[:, None], x[:, None], x[:, None]
    )[:, 0],
    "attention": lambda s, x: F.scaled_dot_product_attention(x, x, x),
    "heads": lambda s, x: torch.matmul(x[:, None], s.table.t()[None].expand(2, 4, 3)),
    "vector": lambda s, x: x @ s.token[0, 0],
    "fold": lambda s, x: s.fc(x.reshape(-1, 4)).view(x.shape),
    "time first": lambda s, x: x.transpose(0, 1).cumsum(0).transpose(0, 1),
    "instance norm": lambda s, x: F.instance_norm(x.mT, weight=s.token[0, 0], bias=s.token[0, 0]),
    "group norm": lambda s, x: F.group_norm(x, 5),
    "layer norm": lambda s, x: F.layer_norm(x, (5, 4)) + F.rms_norm(x, (4,)),
    "fixed batch norm": lambda s, x: F.batch_norm(x.mT, s.running, s.running + 1),
    "written": _padded,
    "counter": _counts,
    "dead mixture": lambda s, x: (x, x.mean(0))[0],
    "only its shape": lambda s, x: x + torch.zeros_like(x.mean(0)),
}  # fmt: skip


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(name: str) -> None:
    model = Of(ACCEPTED[name])
    gm = proved(model, batch())
    output = next(iter(reversed(gm.graph.nodes)))
    assert output.meta["batched"] and isinstance(output.meta["batch_axis"], BatchAxis)
    assert not mixes(model, batch())


@pytest.mark.parametrize("training", [True, False])
def test_dropout_and_random_numbers_of_batch_size(training: bool) -> None:
    def drop_path(s: Of, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, training) * torch.rand(x.shape[0], 1, 1).round() + torch.randn_like(x)

    gm = proved(Of(drop_path), batch(), dynamo=True)
    assert meta(gm, "rand") == (True, BatchAxis(0), None)  # rows of the samples, like data


def test_constants_and_the_batch_are_told_apart() -> None:
    gm = proved(Of(ACCEPTED["class token"]), batch())
    assert meta(gm, "token") == (False, None, None) and meta(gm, "expand") == (False, None, BatchAxis(0))
    assert meta(gm, "linear") == meta(gm, "cat") == (True, BatchAxis(0), None)
    # What a node made and a later one wrote into is of the batch.
    gm = proved(Of(_padded), batch())
    assert meta(gm, "new_zeros") == (False, None, BatchAxis(0)) and meta(gm, "clone") == (True, BatchAxis(0), None)
    gm = proved(Of(ACCEPTED["dead mixture"]), batch())
    assert meta(gm, "mean") == (True, None, None)
    gm = proved(Of(lambda s, x: x[:, :3].reshape(-1, 4) + s.table.repeat(x.shape[0], 1)), batch())
    assert meta(gm, "repeat") == (False, None, BatchAxis(0, 1, 3)) and meta(gm, "add")[1] == BatchAxis(0, 1, 3)
    gm = proved(Of(lambda s, x: x.transpose(0, 1)), batch())
    assert meta(gm, "output") == (True, BatchAxis(1), None)


@pytest.mark.parametrize("make", [nn.BatchNorm1d, nn.SyncBatchNorm])
def test_batch_norm_by_its_mode(make: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), make(4))
    with pytest.raises(IsolationError, match=r"BatchNorm in training mode.*replace_batch_norm\(model\)"):
        proved(model, torch.randn(B, 4))
    assert make is nn.SyncBatchNorm or mixes(model, torch.randn(B, 4))
    proved(model.eval(), torch.randn(B, 4))
    with pytest.raises(IsolationError, match=r"node 'batch_norm' \(models.py:\d+: .*self.bn1"):
        proved(BatchNormNet(), torch.randn(B, 3, 8, 8))


def test_instance_norm_must_keep_no_statistics() -> None:
    x = torch.randn(B, 4, 5)
    proved(nn.Sequential(nn.Conv1d(4, 4, 1), nn.InstanceNorm1d(4, affine=True)), x)
    keeps = nn.Sequential(nn.Conv1d(4, 4, 1), nn.InstanceNorm1d(4, track_running_stats=True))
    with pytest.raises(IsolationError, match=r"'1.running_mean'.*track_running_stats=False"):
        proved(keeps, x)
    assert mixes(keeps, x)
    proved(keeps.eval(), x)
    # A scale per (place in the batch, channel) is no scale of a channel.
    uneven = Of(lambda s, x: F.batch_norm(x.reshape(1, -1, 4), None, None, torch.linspace(0, 1, 30), training=True))
    with pytest.raises(CaptureError, match="fails on the shapes"):
        pipeline.tracked(canonical(uneven), (x.mT,), {}, True, [])
    with pytest.raises(IsolationError, match="a row of its own for each place"):
        verify_isolation(canonical(uneven), args=(x.mT,), kwargs={})


def test_state_that_outlives_the_call() -> None:
    with pytest.raises(IsolationError, match=r"models.py:\d+: self.mean.mul_\(0.5\).*'mean'"):
        proved(Counting(), torch.randn(B, 4))
    renormed = nn.Sequential(nn.Embedding(9, 4, max_norm=1.0), nn.Linear(4, 4))
    with pytest.raises(IsolationError, match=r"embedding_renorm_.*'0.weight'"):
        proved(renormed, torch.zeros(B, 5, dtype=torch.int64))


def test_a_backward_that_counts_over_the_batch() -> None:
    model = nn.Sequential(nn.Embedding(9, 4, scale_grad_by_freq=True), nn.Linear(4, 4))
    with pytest.raises(IsolationError, match="divides gradients by how often a word is in the batch"):
        proved(model, torch.zeros(B, 5, dtype=torch.int64))


def test_attention_of_the_wrong_order() -> None:
    class Encoder(nn.Module):
        def __init__(self, batch_first: bool) -> None:
            super().__init__()
            self.attn = nn.MultiheadAttention(4, 2, batch_first=batch_first)

        def forward(self, x: Tensor) -> Tensor:
            return self.attn(x, x, x, need_weights=False)[0]

    proved(Encoder(True), batch())
    with pytest.raises(IsolationError, match="batch_first=True"):
        verify_isolation(canonical(Encoder(False)), args=(batch(),), kwargs={})
    assert mixes(Encoder(False), batch())


class _Centred(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad - grad.mean(0)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does
def test_a_backward_of_its_own_is_not_proved() -> None:
    with pytest.raises(IsolationError, match=r"an autograd.Function has a backward of its own.*cannot be proved"):
        proved(Of(lambda s, x: _Centred.apply(x)), batch(), dynamo=True)


def test_hooks_and_operators_of_others_are_not_proved() -> None:
    with pytest.raises(
        IsolationError, match=r"node 'watched'.*a hook on this module.*cannot be proved.*remove the hook"
    ):
        proved(Hooked(), torch.randn(B, 4))
    with torch.library._scoped_library("isolation_test", "FRAGMENT") as library:
        library.define("relu(Tensor x) -> Tensor", tags=(torch.Tag.pointwise,))
        library.impl("relu", lambda x: x - x.mean(0), "CompositeExplicitAutograd")
        with pytest.raises(IsolationError, match=r"isolation_test.relu.*no rule"):
            proved(Of(lambda s, x: torch.ops.isolation_test.relu(x)), batch())


def test_inputs_that_may_be_the_batch() -> None:
    class Two(nn.Module):
        def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
            super().__init__()
            self.fc, self.function = nn.Linear(4, 4), function

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.fc(self.function(x, y))

    x = torch.randn(4, 4)
    proved(Two(lambda x, y: x * y), x, torch.randn(4, 4))
    proved(Two(lambda x, y: x @ y), x[:3], torch.randn(4, 4))
    with pytest.raises(IsolationError, match=r"input 'y' of shape \(4, 4\) may hold one row per sample"):
        proved(Two(lambda x, y: x @ y.t() @ y), x, torch.randn(4, 4))
    with pytest.raises(IsolationError, match=r"input 'y' of shape \(4, 4\) may hold one row per sample"):
        proved(Two(lambda x, y: x.view(4, 4) @ y.view(4, 4).t()), x, torch.randn(4, 4))  # for a batch of 4 only
    mask = torch.randn(5, 4)  # as many rows as samples, but cannot grow with the batch
    proved(Two(lambda x, y: x + y), torch.randn(5, 5, 4), mask)


def test_nothing_is_computed_or_changed() -> None:
    model = Of(_counts)
    gm, before, generator = canonical(model), state(model), torch.get_rng_state()
    code = str(gm.graph)
    verify_isolation(gm, args=(batch(),), kwargs={})
    torch.testing.assert_close(state(model), before, rtol=0, atol=0)
    assert str(gm.graph) == code and torch.equal(generator, torch.get_rng_state())
    assert not isinstance(traced(model), CaptureError)
