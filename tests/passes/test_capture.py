"""Capture: by fx and by Dynamo, without a trace of it left in the model."""

import operator
import types
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import dpquant_compile as dpq
from dpquant_compile import pipeline
from dpquant_compile.errors import BudgetError, CaptureError
from dpquant_compile.passes.canonical.mark_sites import collect_sites
from dpquant_compile.passes.capture import capture_dynamo, capture_fx
from dpquant_compile.passes.fx_utils import bind_inputs, op_name
from tests.support.models import (
    BatchNormNet,
    Branch,
    Counting,
    DataBranch,
    Functional,
    GroupNormNet,
    Hooked,
    TextNet,
    canonical,
    gradients,
    seeded,
    state,
    traced,
)


@torch.fx.wrap
def opaque(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight)


class Opaque(nn.Module):
    def __init__(self, changed: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))
        self.changed = changed

    def forward(self, x: Tensor) -> Tensor:
        return opaque(x, self.weight * 2 if self.changed else self.weight)


class Remembering(nn.Module):
    """Keeps its last features and a Python counter, as many models do."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.last: Any = None
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.last = self.fc(x)
        return self.last


class Constant(nn.Module):
    def __init__(self, attribute: bool) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.scale = torch.tensor([1.0, 2.0]) if attribute else None

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * (torch.tensor([1.0, 2.0]) if self.scale is None else self.scale)


IMAGES = (torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(0)),)
TOKENS = (torch.arange(12).view(3, 4) % 11,)
ROWS = (torch.randn(3, 4, generator=torch.Generator().manual_seed(1)),)
SMALL = (torch.randn(3, 2, 5, 5, generator=torch.Generator().manual_seed(2)),)


def operations(gm: fx.GraphModule) -> Counter[str]:
    """What is computed; reads of state and tuple plumbing are spelt differently by the two."""
    left_out = ("get_attr", "placeholder", "output", "getattr", "getitem", "size")
    return Counter(op_name(n).strip("_") for n in gm.graph.nodes if op_name(n) not in left_out)


def attributes_of(model: nn.Module) -> set[str]:
    return set(vars(model)) - {"_is_torch_compile"}  # a flag that Dynamo leaves on every module it has seen


@pytest.mark.parametrize(
    ("make", "args"),
    [(GroupNormNet, IMAGES), (BatchNormNet, IMAGES), (Functional, SMALL), (Counting, ROWS)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_both_ways_end_in_one_form(make: Any, args: tuple[Tensor, ...]) -> None:
    by_fx, by_dynamo = canonical(seeded(make)), canonical(seeded(make), *args, dynamo=True)
    assert operations(by_fx) == operations(by_dynamo)
    fx_sites, dynamo_sites = collect_sites(by_fx), collect_sites(by_dynamo)
    assert fx_sites.names == dynamo_sites.names
    for ours, theirs in zip(fx_sites, dynamo_sites, strict=True):
        assert (ours.op, ours.weight, ours.bias, ours.geometry) == (
            theirs.op,
            theirs.weight,
            theirs.bias,
            theirs.geometry,
        )
        assert (ours.weight_shape, ours.module_types) == (theirs.weight_shape, theirs.module_types)
        assert ours.source == theirs.source
    torch.testing.assert_close(by_fx(*args), by_dynamo(*args), rtol=0, atol=0)


def test_both_ways_name_tied_layers_alike() -> None:
    by_fx, by_dynamo = canonical(seeded(TextNet)), canonical(seeded(TextNet), *TOKENS, dynamo=True)
    assert collect_sites(by_fx).names == collect_sites(by_dynamo).names == ("mix", "head")


@pytest.mark.parametrize(
    ("make", "args"), [(GroupNormNet, IMAGES), (BatchNormNet, IMAGES), (TextNet, TOKENS), (Counting, ROWS)]
)
@pytest.mark.parametrize("dynamo", [False, True], ids=["fx", "dynamo"])
def test_capture_changes_nothing_and_computes_the_same(make: Any, args: tuple[Tensor, ...], dynamo: bool) -> None:
    model = seeded(make)
    before, attributes = state(model), attributes_of(model)
    gm = canonical(model, *args, dynamo=dynamo)
    torch.testing.assert_close(state(model), before, rtol=0, atol=0)
    assert attributes_of(model) == attributes
    names = {n.target for n in gm.graph.nodes if n.op == "get_attr"}
    known = {n for n, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())}
    assert names <= known, "state keeps its names"
    expected = seeded(make)
    torch.testing.assert_close(gm(*args), expected(*args), rtol=0, atol=0)
    torch.testing.assert_close(state(model), state(expected), rtol=0, atol=0)


def test_the_graph_reads_the_models_own_tensors() -> None:
    model = seeded(GroupNormNet)
    gm = canonical(model)
    model.load_state_dict({k: torch.zeros_like(v) for k, v in model.state_dict().items()}, assign=True)
    assert gm(*IMAGES).abs().max() == 0


def test_iadd_with_an_alias_is_recorded_as_inplace() -> None:
    class Alias(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            a = x * 1
            b = a
            b += y
            return a, b

    gm = traced(Alias())
    assert operator.iadd in [n.target for n in gm.graph.nodes]
    for graph in (gm, canonical(Alias())):
        torch.testing.assert_close(graph(torch.ones(2), torch.ones(2)), (torch.full((2,), 2.0),) * 2)


def test_every_augmented_assignment_is_recorded() -> None:
    class Many(nn.Module):
        def forward(self, x: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
            x = x.clone()
            x += 1
            x -= 3
            x *= 2
            x /= 3
            x **= 2
            x //= 0.5
            x %= 5
            n = n.clone()
            n &= 7
            n |= 8
            n ^= 3
            n <<= 2
            n >>= 1
            return x, n

    gm, args = traced(Many()), (torch.randn(3, 2), torch.arange(6))
    assert sum(str(getattr(n.target, "__name__", "")).startswith("i") for n in gm.graph.nodes) == 12
    torch.testing.assert_close(canonical(Many())(*args), Many()(*args), rtol=0, atol=0)


def test_setitem_is_recorded() -> None:
    class Fill(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 1
            y[:, 0] = 5
            return y

    x = torch.randn(2, 3)
    torch.testing.assert_close(canonical(Fill())(x), Fill()(x))


def test_source_lines_are_those_of_the_model() -> None:
    for gm in (traced(seeded(Functional)), capture_dynamo(seeded(Functional), SMALL, {})[0]):
        sources = [n.meta["source"] for n in gm.graph.nodes if n.target is F.linear]
        assert len(sources) == 1 and sources[0].startswith("models.py:") and "self.table" in sources[0]
        assert {n.meta["origin"] for n in gm.graph.nodes} <= {"capture_fx", "capture_dynamo"}


def test_a_wrapped_function_with_parameters_goes_to_dynamo() -> None:
    error = capture_fx(Opaque())
    assert isinstance(error, CaptureError)
    assert "opaque()" in str(error) and "parameters" in str(error)
    gm = canonical(Opaque(), *ROWS, dynamo=True)
    assert len(collect_sites(gm)) == 1


def test_a_wrapped_function_with_computed_parameters_goes_to_dynamo() -> None:
    assert isinstance(capture_fx(Opaque(changed=True)), CaptureError)


def test_what_fx_cannot_trace_is_an_error_to_hold() -> None:
    error = capture_fx(seeded(Branch))
    assert isinstance(error, CaptureError)
    assert str(error).startswith("torch.fx cannot trace Branch: TraceError: symbolically traced variables")
    assert "\n" not in str(error)
    model = seeded(Branch)
    gm = canonical(model, *ROWS, dynamo=True)
    assert collect_sites(gm).names == ("first", "second")
    torch.testing.assert_close(gm(*ROWS), model(*ROWS), rtol=0, atol=0)


def test_what_dynamo_cannot_capture_is_a_readable_error() -> None:
    with pytest.raises(CaptureError) as info:
        capture_dynamo(seeded(DataBranch), ROWS, {})
    assert str(info.value).startswith("Dynamo cannot capture DataBranch as one graph:")
    assert "Fix:" in str(info.value) and len(str(info.value).splitlines()) < 16


def test_a_buffer_that_is_assigned_goes_to_dynamo() -> None:
    class Assigning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.fc(x) + self.calls

    model = Assigning()
    error = capture_fx(model)
    assert isinstance(error, CaptureError) and "calls" in str(error)
    gm = canonical(model, *ROWS, dynamo=True)
    assert model.calls == 0
    torch.testing.assert_close(gm(*ROWS), model.fc(*ROWS) + 1, rtol=0, atol=0)
    assert model.calls == 1


def test_batch_size_independence() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) if x.shape[0] < 5 else self.fc(x.relu())

    gm, guards = capture_dynamo(seeded(Branch), ROWS, {})
    assert guards.bound is None
    torch.testing.assert_close(gm(torch.ones(9, 4)), seeded(Branch)(torch.ones(9, 4)), rtol=0, atol=0)
    assert "x.shape[0] < 5" in str(capture_dynamo(Fixed(), ROWS, {})[1].bound)
    assert capture_dynamo(seeded(Branch), (torch.ones(1, 4),), {})[1].bound, "Dynamo specialises on one sample"


def test_gradients_do_not_bind_the_batch_size() -> None:
    """A privacy engine leaves views of one buffer as gradients, whose sizes Dynamo would take for symbols."""
    model = seeded(Branch)
    for parameter in model.parameters():
        parameter.grad = torch.zeros(2 * parameter.numel())[: parameter.numel()].view(parameter.shape)
    held = [parameter.grad for parameter in model.parameters()]
    assert capture_dynamo(model, ROWS, {})[1].bound is None
    assert all(parameter.grad is grad for parameter, grad in zip(model.parameters(), held, strict=True))


def test_dynamo_keeps_signature_and_outputs() -> None:
    class Dicts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, inputs: dict[str, Tensor], *, flip: bool = False) -> dict[str, Any]:
            y = self.fc(inputs["a"])
            return {"y": -y if flip else y, "rest": [inputs["b"], None]}

    model, args = seeded(Dicts), ({"a": ROWS[0], "b": torch.ones(3)},)
    gm, _ = capture_dynamo(model, args, {"flip": True})
    torch.testing.assert_close(gm(*args, flip=True), model(*args, flip=True), rtol=0, atol=0)
    assert len(bind_inputs(gm, args, {"flip": True})) == sum(n.op == "placeholder" for n in gm.graph.nodes)


def test_dynamo_keeps_constants() -> None:
    outside = torch.tensor([1.0, 2.0, 3.0, 4.0])

    class Outside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) * outside

    model = Outside()
    gm = canonical(model, *ROWS, dynamo=True)
    torch.testing.assert_close(gm(*ROWS), model(*ROWS), rtol=0, atol=0)
    assert set(model.state_dict()) == {"fc.weight", "fc.bias"} and not hasattr(model, "_const")


@pytest.mark.parametrize("attribute", [False, True], ids=["made in forward", "plain attribute"])
@pytest.mark.parametrize("dynamo", [False, True], ids=["fx", "dynamo"])
def test_tensor_constants(attribute: bool, dynamo: bool) -> None:
    model, x = Constant(attribute), torch.randn(3, 2)
    before = attributes_of(model)
    gm = canonical(model, x, dynamo=dynamo)
    torch.testing.assert_close(gm(x), model(x), rtol=0, atol=0)
    assert attributes_of(model) == before


def test_tracing_leaves_no_proxy_behind() -> None:
    model = Remembering()
    gm = capture_fx(model)
    assert model.count == 0 and model.last is None
    assert isinstance(gm, CaptureError), "the graph would not keep `last` up to date"
    capture_dynamo(model, ROWS, {})
    assert model.count == 0 and model.last is None


def test_hooks_of_containers_go_on_being_called() -> None:
    model, seen = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2)), []
    model[0].register_forward_hook(lambda module, args, out: seen.append(type(out)))
    gm = canonical(model)
    gm(*ROWS)
    assert seen == [Tensor]


def test_hooks_of_layers_go_on_being_called() -> None:
    model = seeded(Hooked)
    gm = canonical(model)
    assert model.seen == []
    gm(*ROWS)
    assert model.seen == [(3, 4)]


def test_a_graph_module_is_taken_as_it_is() -> None:
    model = fx.symbolic_trace(seeded(GroupNormNet))
    gm = canonical(model)
    torch.testing.assert_close(gm(*IMAGES), model(*IMAGES), rtol=0, atol=0)
    assert collect_sites(gm).names == collect_sites(canonical(seeded(GroupNormNet))).names


def test_a_dynamo_graph_can_be_copied_without_a_warning() -> None:
    gm = pipeline.tracked(canonical(seeded(Branch), *ROWS, dynamo=True), ROWS, {}, True, [])
    assert len(collect_sites(gm)) == 2


class Region(nn.Module):
    def __init__(self, region: Any) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.region = region

    def forward(self, x: Tensor) -> Tensor:
        with self.region():
            y = self.fc(x)
        return self.fc(x) + y


REGIONS = {"no_grad": torch.no_grad, "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16)}


@pytest.mark.parametrize("name", REGIONS)
@pytest.mark.parametrize("dynamo", [False, True], ids=["fx", "dynamo"])
def test_regions_are_kept_or_refused(name: str, dynamo: bool) -> None:
    model = Region(REGIONS[name])
    if not dynamo and isinstance(capture_fx(model), CaptureError):
        return
    parameters = list(model.parameters())
    found = gradients(canonical(model, *ROWS, dynamo=dynamo), [*ROWS], parameters)
    torch.testing.assert_close(found, gradients(model, [*ROWS], parameters), rtol=0, atol=0)


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


class Cache:
    """Stands for the cache of a language model: an object that no graph can hold."""


class Cached(nn.Module):
    """Returns a cache unless its configuration, or the call, says otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.config = types.SimpleNamespace(use_cache=True)

    def forward(self, x: Tensor, use_cache: bool | None = None) -> dict[str, Any]:
        use_cache = self.config.use_cache if use_cache is None else use_cache
        return {"y": self.fc(x), "past_key_values": Cache() if use_cache else None}


def test_a_capture_leaves_a_default_cache_out() -> None:
    model = Cached()
    out = capture_dynamo(model, ROWS, {})[0](*ROWS)
    torch.testing.assert_close(out["y"], model(*ROWS)["y"], rtol=0, atol=0)
    assert out["past_key_values"] is None and model.config.use_cache


def test_an_output_that_no_graph_holds_is_refused_in_few_words() -> None:
    with pytest.raises(CaptureError, match="returns a Cache, which is neither a tensor") as refused:
        capture_dynamo(Cached(), ROWS, {"use_cache": True})
    assert len(str(refused.value)) < 300


class Clamping(nn.Module):
    """Assigns a plain value: always the same, or another in each call."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.window, self.counts = 9, counts

    def forward(self, x: Tensor) -> Tensor:
        self.window = self.window + 1 if self.counts else min(self.window, x.shape[1])
        return self.fc(x) * self.window


@pytest.mark.parametrize("counts", [False, True])
def test_an_assignment_that_every_call_repeats_is_none(counts: bool) -> None:
    model = Clamping(counts)
    gm, _ = capture_dynamo(model, ROWS, {})
    assigned = gm.graph.output_node().meta["assigns"]
    assert model.window == 9 and (assigned is None) != counts
    torch.testing.assert_close(gm(*ROWS), model(*ROWS), rtol=0, atol=0)
