"""`CompiledModule` behaves as the module it was made of: state, modes, copies, hooks, arguments, steps and errors."""

import copy
import inspect
import io
import pickle
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dpquant_compile as dpq
from dpquant_compile.errors import CaptureError, CompileSpecError
from dpquant_compile.policy import draw_policy
from tests.support.models import BatchNormNet, Branch, GroupNormNet, Hooked, TextNet, gradients, seeded, state

IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
ROWS = IMAGES[:, 0, 0, :4]


def reference(model: nn.Module, budget: float = 0.5, **options: Any) -> dpq.CompiledModule:
    return dpq.compile(model, budget, backend="reference", **options)


def pair(make: Callable[[], nn.Module], policy: Any = "none", **options: Any) -> tuple[nn.Module, dpq.CompiledModule]:
    """The original and, made of a copy of it, the compiled model."""
    original = seeded(make)
    compiled = reference(copy.deepcopy(original), **options)
    compiled.set_policy(policy)
    return original, compiled


def loss_grads(model: nn.Module, x: Tensor = IMAGES) -> list[Tensor]:
    model.zero_grad()
    model(x).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# State


def test_names_and_tensors_are_those_of_the_original() -> None:
    original = seeded(BatchNormNet)
    wanted, names = state(original), list(original.state_dict())
    model = reference(original)
    model(IMAGES).sum().backward()
    assert list(model.state_dict()) == names
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in original.named_parameters()]
    assert all(a is b for a, b in zip(model.parameters(), original.parameters(), strict=True))
    assert [n for n, _ in model.named_modules()] == [n for n, _ in original.named_modules()]
    assert [n for n, _ in model.named_buffers()] == [n for n, _ in original.named_buffers()]
    assert set(wanted) == {n for n, _ in (*model.named_parameters(), *model.named_buffers())}


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("policy", ["none", "all"])
def test_loaded_weights_are_used(assign: bool, policy: str) -> None:
    _, model = pair(GroupNormNet, policy)
    model(IMAGES)
    other = seeded(GroupNormNet, 5)
    result = model.load_state_dict(copy.deepcopy(other.state_dict()), assign=assign)
    assert not result.missing_keys and not result.unexpected_keys
    fresh = reference(other, seed=0)
    fresh.set_policy(policy)
    fresh.step = model.step  # which counts the loaded weights as new ones
    assert torch.equal(model(IMAGES), fresh(IMAGES))
    with pytest.raises(RuntimeError, match="fc"):
        model.load_state_dict({"fc.weight": torch.zeros(5, 4)})


def test_tied_weights_stay_tied() -> None:
    original, model = pair(TextNet)
    tokens = torch.arange(12).reshape(3, 4) % 11
    assert model.head.weight is model.embed.weight
    ours, theirs = (gradients(m, [tokens], list(m.parameters())) for m in (model, original))
    assert equal(ours, theirs)
    assert model.sites.names == ("mix", "head") or model.sites.names == ("mix", "embed")
    model.load_state_dict({k: torch.zeros_like(v) for k, v in model.state_dict().items()}, assign=True)
    assert (model(tokens) == 0).all()
    assert copy.deepcopy(model).head.weight is not model.head.weight


def test_running_statistics_are_updated_as_in_the_original() -> None:
    original, model = pair(BatchNormNet)
    for seed in range(3):
        batch = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(original(batch), model(batch))
    original.eval(), model.eval()
    assert torch.equal(original(IMAGES), model(IMAGES))
    ours, theirs = state(model), state(original)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_dtype_can_change(dtype: torch.dtype) -> None:
    original, model = pair(GroupNormNet)
    model(IMAGES)
    original.to(dtype), model.to(dtype)
    assert equal(loss_grads(model, IMAGES.to(dtype)), loss_grads(original, IMAGES.to(dtype)))
    model.set_policy("all")
    assert all(grad.dtype == dtype and grad.isfinite().all() for grad in loss_grads(model, IMAGES.to(dtype)))
    assert model.to("meta").fc.weight.device.type == "meta"


def test_frozen_parameters_get_no_gradient() -> None:
    original, model = pair(GroupNormNet)
    for m in (original, model):
        m.blocks.requires_grad_(False)
        m.fc.bias.requires_grad_(False)
    assert equal(loss_grads(model), loss_grads(original))
    model.set_policy("all")
    assert len(loss_grads(model)) == 3
    model.requires_grad_(False)
    assert not model(IMAGES).requires_grad


def test_a_child_that_is_replaced_is_used_or_refused() -> None:
    _, model = pair(GroupNormNet)
    model(IMAGES)
    model.fc = nn.Linear(4, 7)
    assert model(IMAGES).shape == (4, 7)


def test_a_child_inside_a_container_can_be_replaced() -> None:
    _, model = pair(GroupNormNet)
    model(IMAGES)
    model.blocks[1] = seeded(GroupNormNet, 3).blocks[1]
    assert torch.equal(model(IMAGES), model._original(IMAGES))


# Modes


@pytest.mark.slow
def test_eval_is_full_precision_unless_asked() -> None:
    original, model = pair(BatchNormNet, "all")
    model.eval()
    assert not model.training and not model.bn1.training
    assert torch.equal(model(IMAGES), original.eval()(IMAGES))
    low = reference(seeded(BatchNormNet), quantize_eval=True).eval()
    low.set_policy("all")
    assert not torch.equal(low(IMAGES), original(IMAGES))
    low.set_policy("none")
    assert torch.equal(low(IMAGES), original(IMAGES))
    assert torch.equal(low(IMAGES), low(IMAGES)) and low.step == 0


def test_a_mode_that_is_set_on_each_module_is_the_model_s() -> None:
    """As Lightning restores modes after a validation: it sets the attribute, and calls no train()."""
    compiled = reference(seeded(GroupNormNet)).train()
    modes = {name: module.training for name, module in compiled.named_modules()}
    compiled.eval()
    assert not compiled.training and not compiled._original.training
    for name, module in compiled.named_modules():
        module.training = modes[name]
    assert compiled.training and compiled._original.training


def test_the_variant_is_of_the_mode_that_the_model_is_in() -> None:
    _, model = pair(BatchNormNet, "all")
    wanted = model(IMAGES)
    model.eval()
    model(IMAGES)
    model.train()
    assert torch.equal(model.variant("all")(IMAGES), wanted)


def test_the_first_forward_may_be_in_inference_mode() -> None:
    original, model = pair(GroupNormNet, "none")
    model.eval()
    with torch.inference_mode():
        assert torch.equal(model(IMAGES), original(IMAGES))


def test_training_goes_on_after_inference_mode() -> None:
    _, model = pair(GroupNormNet, "all")
    wanted = loss_grads(model)
    model.set_policy("none")
    with torch.inference_mode():
        model(IMAGES)
    loss_grads(model)
    model.set_policy("all")
    assert equal(loss_grads(model), wanted)


@pytest.mark.parametrize("policy", ["none", "all"])
def test_autocast_trains(policy: str) -> None:
    original, model = pair(GroupNormNet, policy)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = model(IMAGES), original(IMAGES)
    assert ours.dtype == original.fc.weight.dtype, "a site computes in the dtype of its weight"
    if policy == "none":
        torch.testing.assert_close(ours, theirs.float(), rtol=0.05, atol=0.02)
    ours.float().sum().backward()


class Product(nn.Module):
    """Its site is known only with its graph, which takes Dynamo."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.eye(4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w if x.shape[1] > 2 else x


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("policy", ["none", "all", []])
def test_a_policy_set_before_sites_are_known_is_kept(policy: Any, copied: bool) -> None:
    model = reference(Product(), budget=0.5)
    assert not len(model.sites)
    model.set_policy(policy)
    model = copy.deepcopy(model) if copied else model
    model.capture(torch.randn(3, 4))
    assert model.sites.names == ("w",)
    assert str(model.policy) == ("all" if policy == "all" else "none")


# Copies


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_a_copy_gives_the_same_results_and_then_goes_its_own_way(how: str) -> None:
    _, model = pair(BatchNormNet, ["conv1", "fc"])
    model(IMAGES)
    if how == "torch.save":
        torch.save(model, buffer := io.BytesIO())
        buffer.seek(0)
        twin = torch.load(buffer, weights_only=False)
    else:
        twin = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    assert twin.policy == model.policy and twin.sites.names == model.sites.names and twin.step == model.step
    assert equal(loss_grads(twin), loss_grads(model))
    twin.set_policy("none")
    with torch.no_grad():
        twin.fc.bias.add_(1)
    assert len(model.policy) == 2 and not torch.equal(model.fc.bias, twin.fc.bias)


def test_a_copy_made_after_an_optimizer_step_goes_on_as_the_original() -> None:
    _, model = pair(GroupNormNet, "all")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss_grads(model)
    optimizer.step()
    twin = copy.deepcopy(model)
    assert torch.equal(model(IMAGES), twin(IMAGES))


class Plain(nn.Module):
    """Only Dynamo can trace it; one weight belongs to no layer, and one layer is never called; input [B, 4]."""

    def __init__(self, with_weight: bool = True, with_unused: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.table = nn.Parameter(torch.randn(4, 4)) if with_weight else None
        self.unused = nn.Linear(4, 4) if with_unused else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if x.shape[1] > 3:
            x = x.relu()
        return x if self.table is None else F.linear(x, self.table)


def test_a_dynamo_captured_model_can_be_copied() -> None:
    model = reference(Plain(with_unused=False), 1)
    model(ROWS)
    model.set_policy("all")
    assert torch.equal(copy.deepcopy(model)(ROWS), model(ROWS))


def test_a_policy_of_all_survives_the_first_forward() -> None:
    model = reference(Plain(with_weight=False), 1)
    model.set_policy("all")
    model(ROWS)
    assert str(model.policy) == "all"


# Behaving as the original


def test_attributes_are_delegated() -> None:
    original = seeded(GroupNormNet)
    original.note = "kept"
    model = reference(original)
    assert model.note == "kept" and model.fc is original.fc and model.blocks[0].conv1 is original.blocks[0].conv1
    with pytest.raises(AttributeError, match="nothing"):
        _ = model.nothing
    assert "of 6 sites" in repr(model)


def test_hooks_of_the_original_run() -> None:
    original = seeded(GroupNormNet)
    original.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    original.register_forward_hook(lambda module, args, out: out + 1)
    model = reference(original)
    model.set_policy("none")
    assert torch.equal(model(IMAGES), original(IMAGES))
    handle = model.register_forward_hook(lambda module, args, out: out * 0)
    assert (model(IMAGES) == 0).all()
    handle.remove()
    assert torch.equal(model(IMAGES), original(IMAGES))


def test_hooks_inside_run_once_per_forward() -> None:
    model = reference(seeded(Hooked))
    seen = len(model.seen)
    model(ROWS)
    assert len(model.seen) - seen == 1


def test_hooks_of_a_dynamo_captured_original_run() -> None:
    original = seeded(Branch)
    original.register_forward_hook(lambda module, args, out: out * 2)
    model = reference(original)
    model.set_policy("none")
    assert torch.equal(model(ROWS), original(ROWS))


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_backward_hooks_of_the_original_run() -> None:
    original, seen = seeded(GroupNormNet), []
    original.register_full_backward_hook(lambda *args: seen.append(1))
    loss_grads(reference(original))
    assert seen == [1]


@pytest.mark.parametrize("size", [0, 1])
@pytest.mark.parametrize("policy", ["none", "all"])
def test_batches_of_none_and_one(size: int, policy: str) -> None:
    original, model = pair(GroupNormNet, policy)
    model(IMAGES)
    ours, theirs = loss_grads(model, IMAGES[:size]), loss_grads(original, IMAGES[:size])
    assert len(ours) == len(theirs) and all(a.shape == b.shape for a, b in zip(ours, theirs, strict=True))
    assert policy == "all" or equal(ours, theirs)


def test_a_dynamo_captured_model_may_start_with_an_empty_batch() -> None:
    model = reference(seeded(Branch))
    assert model(ROWS[:0]).shape == (0, 2)
    assert model(ROWS).shape == (4, 2)


# Steps and seeds

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "sgd_foreach": lambda p: torch.optim.SGD(p, 0.1, foreach=True),
    "sgd_fused": lambda p: torch.optim.SGD(p, 0.1, fused=True),
    "adam": torch.optim.Adam,
    "adam_foreach": lambda p: torch.optim.Adam(p, foreach=True),
    "adam_fused": lambda p: torch.optim.Adam(p, fused=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, fused=True),
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_step_counts_optimizer_steps_and_nothing_else(name: str) -> None:
    model = reference(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    for step in range(3):
        for _ in range(2):  # micro-batches
            model(ROWS).sum().backward()
            assert model.step == step
        model.eval()
        model(ROWS)
        model.train()
        optimizer.step()
        optimizer.zero_grad()
    model(ROWS)
    assert model.step == 3


def trained(seed: int, policy: Any = None) -> list[Tensor]:
    model = reference(seeded(GroupNormNet), 3, seed=seed)
    if policy is not None:
        model.set_policy(policy)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        loss_grads(model)
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.slow
def test_a_run_repeats_by_its_seed() -> None:
    assert equal(trained(1), trained(1))
    assert not equal(trained(1, "all"), trained(2, "all"))
    assert equal(trained(1, "none"), trained(2, "none"))


def test_a_policy_set_between_forward_and_backward_does_not_tear_the_step() -> None:
    _, model = pair(GroupNormNet, "all")
    wanted = loss_grads(model)
    for other in ("none", ["fc"]):
        model.set_policy("all")
        model.zero_grad()
        loss = model(IMAGES).square().sum()
        model.set_policy(other)
        model.eval()
        model(IMAGES)
        model.train()
        model(IMAGES)
        loss.backward()
        assert equal([parameter.grad for parameter in model.parameters()], wanted)


def test_the_first_policy_is_a_uniform_draw() -> None:
    names, k, seeds = [f"layer{i}" for i in range(5)], 2, 2000
    counts = Counter(str(draw_policy(k, names, seed)) for seed in range(seeds))
    assert len(counts) == 10
    chi_square = sum((count - seeds / 10) ** 2 / (seeds / 10) for count in counts.values())
    assert chi_square < 27.9, "nine degrees of freedom: exceeded by chance once in a thousand"
    assert reference(seeded(GroupNormNet), 2, seed=4).policy == draw_policy(2, reference(GroupNormNet()).sites.names, 4)


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
    model = dpq.compile(nn.Sequential(nn.Linear(16, 4)), budget=1, format="luq_fp4", backend="reference")
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


# Language models


class Language(nn.Module):
    """Returns a cache in the manner of transformers: an object, unless its configuration or the call says otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.config = SimpleNamespace(use_cache=True)

    def forward(self, x: Tensor, use_cache: bool | None = None) -> dict[str, Any]:
        use_cache = self.config.use_cache if use_cache is None else use_cache
        return {"y": self.fc(x), "past_key_values": object() if use_cache else None}


def test_a_cache_is_returned_in_eval_and_left_out_in_training() -> None:
    original, compiled = pair(Language, inner="eager")
    trained = compiled.train()(ROWS)
    assert trained["past_key_values"] is None and torch.equal(trained["y"], original(ROWS)["y"])
    for model in (original.eval(), compiled.eval()):
        assert model(ROWS)["past_key_values"] is not None and model(ROWS, use_cache=False)["past_key_values"] is None
    quantized = pair(Language, "all", inner="eager", quantize_eval=True)[1].eval()
    assert quantized(ROWS)["past_key_values"] is None, "low precision runs by the graph, which holds no cache"


@pytest.mark.slow
def test_the_mode_of_gradients_is_the_callers_whatever_came_before() -> None:
    class Rotating(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                cos = x.cos()
            return self.fc(x) * cos

    original, compiled = pair(Rotating, inner="aot_eager")
    expected = original(ROWS)
    for model in (compiled.train(), compiled.eval()):
        for region in (torch.no_grad, torch.inference_mode, torch.no_grad):
            with region():
                torch.testing.assert_close(model(ROWS), expected, rtol=0, atol=0)
                assert not torch.is_grad_enabled()
        assert model(ROWS).requires_grad


# Exports and wrappers


def exported(inner: str = "eager", **options: Any) -> tuple[nn.Module, dpq.CompiledModule, Tensor]:
    model = seeded(GroupNormNet).eval()
    return model, dpq.compile(model, budget=2, inner=inner, **options), torch.randn(3, 3, 8, 8)


def operators(graph: torch.fx.Graph) -> list[Any]:
    return [node.target for node in graph.nodes if node.op == "call_function"]


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True])
def test_export_gives_the_plain_models_graph(strict: bool) -> None:
    model, compiled, x = exported()
    program, plain = (torch.export.export(m, (x,), strict=strict) for m in (compiled, model))
    assert operators(program.graph) == operators(plain.graph)
    assert program.graph_signature.parameters == plain.graph_signature.parameters
    torch.testing.assert_close(program.module()(x), model(x))


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True])
def test_export_takes_inputs_and_dynamic_shapes_by_the_names_of_the_original(strict: bool) -> None:
    model, compiled, x = exported()
    shapes = {"x": {0: torch.export.Dim("batch")}}
    program, plain = (torch.export.export(m, (x,), dynamic_shapes=shapes, strict=strict) for m in (compiled, model))
    assert program.graph_signature.user_inputs == plain.graph_signature.user_inputs == ("x",)
    other = torch.randn(5, 3, 8, 8)
    torch.testing.assert_close(program.module()(other), model(other))
    again = copy.deepcopy(compiled)
    assert inspect.signature(again.forward) == inspect.signature(model.forward)
    assert again.forward.__self__ is again


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_jit_trace_gives_the_plain_models_graph() -> None:
    model, compiled, x = exported()
    program, plain = torch.jit.trace(compiled, x), torch.jit.trace(model, x)
    kinds = [[node.kind() for node in p.inlined_graph.nodes()] for p in (program, plain)]
    assert kinds[0] == kinds[1] and list(program.state_dict()) == list(model.state_dict())
    torch.testing.assert_close(program(x), model(x))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning")  # torch's own
def test_onnx_export_gives_the_plain_models_results() -> None:
    pytest.importorskip("onnxscript")
    model, compiled, x = exported()
    program, plain = (torch.onnx.export(m, (x,), dynamo=True) for m in (compiled, model))
    assert program is not None and plain is not None
    assert [n.op_type for n in program.model.graph] == [n.op_type for n in plain.model.graph]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("how", ["train", "quantize_eval", "jit", "fx"])
def test_what_no_plain_graph_can_hold_is_not_exported(how: str) -> None:
    _, compiled, x = exported(quantize_eval=how == "quantize_eval")
    compiled.train(how in ("train", "jit"))
    exports: dict[str, Callable[[], Any]] = {
        "fx": lambda: torch.fx.symbolic_trace(compiled),
        "jit": lambda: torch.jit.trace(compiled, x),
    }
    with pytest.raises(CaptureError, match=r"Fix: .*give model\.original"):
        exports.get(how, lambda: torch.export.export(compiled, (x,)))()
    assert operators(torch.export.export(compiled.original, (x,)).graph)


def test_a_model_around_a_compiled_one_can_be_traced_in_eval() -> None:
    model, compiled, x = exported()
    around = nn.Sequential(compiled, nn.ReLU()).eval()
    torch.testing.assert_close(torch.fx.symbolic_trace(around)(x), model(x).relu())
    with pytest.raises(CaptureError, match=r"model\.eval\(\) first"):
        torch.fx.symbolic_trace(around.train())


@pytest.mark.slow
def test_torch_compile_on_top_changes_nothing() -> None:
    model, compiled, x = exported()
    again = torch.compile(compiled, backend="aot_eager")
    torch.testing.assert_close(again(x), model(x), rtol=0, atol=0)
    compiled.train()
    compiled.set_policy("none")
    parameters = list(compiled.parameters())
    torch.testing.assert_close(gradients(again, [x], parameters), gradients(model, [x], parameters))


@pytest.mark.parametrize("training", [False, True])
def test_functional_call_uses_the_given_tensors(training: bool) -> None:
    model, compiled, x = exported()
    compiled.train(training)
    compiled.set_policy("none")
    compiled(x)
    given = {name: (2 * p.detach()).requires_grad_() for name, p in model.named_parameters()}
    results = []
    for module in (compiled, model):
        y = torch.func.functional_call(module, given, (x,))
        results.append([y, *torch.autograd.grad(y.square().sum(), list(given.values()))])
    torch.testing.assert_close(*results)


def test_half_precision_models_run() -> None:
    model, compiled, x = exported()
    compiled.half()
    torch.testing.assert_close(compiled(x.half()), model(x.half()), rtol=0, atol=0)
    compiled.train()
    compiled(x.half()).float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float16 for p in compiled.parameters())


def test_data_parallel_runs_where_it_copies_nothing_and_is_refused_elsewhere() -> None:
    model, compiled, x = exported()
    torch.testing.assert_close(nn.DataParallel(compiled)(x), model(x), rtol=0, atol=0)
    with pytest.raises(CaptureError, match="DistributedDataParallel"):
        compiled._replicate_for_data_parallel()  # what nn.DataParallel calls where there are devices


@pytest.mark.parametrize("wrap", [nn.DataParallel, nn.Sequential])
def test_wrappers_of_compiled_models_are_not_compiled(wrap: Callable[[nn.Module], nn.Module]) -> None:
    _, compiled, _ = exported()
    with pytest.raises(CompileSpecError, match="Fix: compile the"):
        dpq.compile(wrap(compiled), budget=1)
