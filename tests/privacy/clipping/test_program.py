"""Real architectures against Opacus' hooks, FP4 against the reference, stock Opacus, and Inductor against eager."""

import copy
import re
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import opacus
import pytest
import torch
import torch.nn.functional as F
from opacus.optimizers import DPOptimizer
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, nn

import dpquant_compile as dpq
from dpquant_compile.errors import PrivateTrainingError
from dpquant_compile.passes.runner import called_programs
from dpquant_compile.torchvision_compat import TorchvisionMissingError
from dpquant_compile.torchvision_compat import models as torchvision_models
from tests.support import models
from tests.support.heavy import few
from tests.support.private import assert_close, clipped_sums, made_private, reference_sums
from tests.support.private_loops import (
    FEATURES,
    Run,
    assert_same,
    compiled_net,
    dataset,
    logical_sums,
    made,
    plain_loader,
    still,
    sums_of,
    train,
)

try:
    zoo: Any = torchvision_models()
except TorchvisionMissingError:
    zoo = None

needs_torchvision = pytest.mark.skipif(zoo is None, reason="torchvision is not installed")

# Opacus registers backward hooks on modules whose inputs need no gradient; torch says so each time.
pytestmark = [
    pytest.mark.slow,  # models of real size, and Inductor
    pytest.mark.filterwarnings("ignore:Full backward hook is firing when gradients are computed"),
]


def without_inplace(model: nn.Module) -> nn.Module:
    """A copy that Opacus' hooks can train: they fail on operators that write into their input."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if hasattr(module, "inplace"):
            module.inplace = False
    return model


def opacus_sums(
    model: nn.Module, inputs: Sequence[Tensor], bound: float, loss: Callable[[Any], Tensor]
) -> dict[str, Tensor]:
    """The clipped sums that Opacus' hooks give for the sum of the samples' losses."""
    names = {id(p): name for name, p in model.named_parameters()}
    hooked = opacus.GradSampleModule(model, loss_reduction="sum")
    optimizer = DPOptimizer(
        torch.optim.SGD([p for p in hooked.parameters() if p.requires_grad], lr=0.1),
        noise_multiplier=0.0,
        max_grad_norm=bound,
        expected_batch_size=1,
        loss_reduction="sum",
    )
    loss(hooked(*inputs)).backward()
    optimizer.clip_and_accumulate()
    return {names[id(p)]: p.summed_grad for p in optimizer.params}


def compare(
    model: nn.Module,
    inputs: Sequence[Tensor],
    loss: Callable[[Any], Tensor],
    twin: nn.Module | None = None,
    rename: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda sums: sums,
    bound: float = 0.5,
) -> None:
    """Ours against Opacus' on `twin`, a copy that its hooks can train: every parameter to 1e-4 of its norm.

    Ours is padded by one row, which must count for nothing.
    """
    size = len(inputs[0])
    expected = rename(opacus_sums((twin or without_inplace(model)).train(), inputs, bound, loss))
    compiled, _, engine = made_private(model.train(), size + 1, bound=bound)
    loss(compiled(*inputs)).backward()
    actual = {name: p.summed_grad for name, p in compiled.named_parameters() if p.requires_grad}
    assert set(actual) == set(expected)
    assert_close(actual, expected, 1e-4)
    total = torch.stack([value.norm() for value in expected.values()]).norm()
    assert 1e-3 < total <= size * bound
    assert engine.session is not None and engine.session.dropped == 0


def classes(size: int, number: int = 10) -> Callable[[Any], Tensor]:
    labels = torch.arange(size) % number
    return lambda logits: F.cross_entropy(logits, labels, reduction="sum")


@pytest.mark.heavy
@needs_torchvision
def test_resnet18_equals_opacus() -> None:
    torch.manual_seed(0)
    model = zoo.resnet18(num_classes=10, norm_layer=lambda channels: nn.GroupNorm(8, channels))

    def added(block: Any, x: Tensor) -> Tensor:
        """Its forward, without `+=`."""
        y = block.bn2(block.conv2(block.relu(block.bn1(block.conv1(x)))))
        return block.relu(y + (x if block.downsample is None else block.downsample(x)))

    twin = without_inplace(model)
    for module in twin.modules():
        if isinstance(module, zoo.resnet.BasicBlock):
            module.forward = MethodType(added, module)
    compare(model, [torch.randn(4, 3, 32, 32)], classes(4), twin)


@pytest.mark.heavy
@needs_torchvision
def test_densenet_equals_opacus() -> None:
    """DenseNet121's blocks, two layers each: Inductor needs a minute for the whole of it."""
    torch.manual_seed(0)
    net = zoo.DenseNet(growth_rate=8, block_config=(2, 2, 2, 2), num_init_features=16, num_classes=10)
    model = dpq.replace_batch_norm(net, groups=4)

    def added(net: Any, x: Tensor) -> Tensor:
        """Its forward, without an in-place ReLU at the end."""
        return net.classifier(F.adaptive_avg_pool2d(F.relu(net.features(x)), 1).flatten(1))

    twin = without_inplace(model)
    twin.forward = MethodType(added, twin)
    compare(model, [torch.randn(4, 3, 32, 32)], classes(4), twin)


def tiny_vit() -> nn.Module:
    model = zoo.VisionTransformer(
        image_size=32, patch_size=8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=32, num_classes=10
    )
    nn.init.normal_(model.heads.head.weight, std=0.3)  # torchvision starts at zero, where nothing flows back
    return model


class LinearAttention(nn.Module):
    """nn.MultiheadAttention of linears, which Opacus has rules for."""

    def __init__(self, own: nn.MultiheadAttention) -> None:
        super().__init__()
        self.heads, self.out_proj = own.num_heads, nn.Linear(own.embed_dim, own.embed_dim)
        self.out_proj.load_state_dict(own.out_proj.state_dict())
        parts = zip("qkv", own.in_proj_weight.chunk(3), own.in_proj_bias.chunk(3), strict=True)
        for name, weight, bias in parts:
            linear = nn.Linear(own.embed_dim, own.embed_dim)
            linear.load_state_dict(dict(weight=weight, bias=bias))
            self.add_module(f"{name}linear", linear)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, need_weights: bool) -> tuple[Tensor, None]:
        projected = (self.qlinear(q), self.klinear(k), self.vlinear(v))
        q, k, v = (x.unflatten(2, (self.heads, -1)).transpose(1, 2) for x in projected)
        return self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)), None


@needs_torchvision
def test_vit_equals_opacus() -> None:
    model: Any = models.seeded(tiny_vit)
    # Opacus has no rule for parameters outside of layers, and its own attention gives other values than torch's.
    for parameter in (model.class_token, model.encoder.pos_embedding):
        parameter.requires_grad_(False)
    twin: Any = without_inplace(model)
    for block in twin.encoder.layers:
        block.self_attention = LinearAttention(block.self_attention)

    def rename(sums: dict[str, Tensor]) -> dict[str, Tensor]:
        merged = {name: value for name, value in sums.items() if "linear." not in name}
        for kind in ("weight", "bias"):
            for name in [name for name in sums if name.endswith(f".qlinear.{kind}")]:
                parts = [sums[name.replace("qlinear", f"{part}linear")] for part in "qkv"]
                merged[name.replace("qlinear.", "in_proj_")] = torch.cat(parts)
        return merged

    compare(model, [torch.randn(4, 3, 32, 32)], classes(4), twin, rename)


@needs_torchvision
def test_vit_with_its_class_token_equals_autograd() -> None:
    model, x = models.seeded(tiny_vit), torch.randn(3, 3, 32, 32)
    compiled, _, _ = made_private(model, 4)
    assert_close(clipped_sums(compiled, [x]), reference_sums(model, [x]), 1e-4)


@pytest.mark.heavy
def test_bert_equals_opacus() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(config)
    tokens = torch.randint(0, 50, (4, 9))
    mask = (torch.arange(9)[None] < torch.tensor([[9], [7], [4], [6]])).long()
    # Opacus needs positions by sample: what the model makes itself has one row, which it takes for one sample.
    kinds, positions = torch.zeros(4, 9, dtype=torch.int64), torch.arange(9).expand(4, -1)
    compare(model, [tokens, mask, kinds, positions], lambda out: classes(4, 3)(out.logits))
    compiled, _, _ = made_private(model, 5)
    classes(4, 3)(compiled(tokens, attention_mask=mask).logits).backward()
    expected = opacus_sums(
        copy.deepcopy(model), [tokens, mask, kinds, positions], 0.5, lambda o: classes(4, 3)(o.logits)
    )
    assert_close({name: p.summed_grad for name, p in compiled.named_parameters()}, expected, 1e-4)


class Words(nn.Module):
    """A text model without attention: embedding, linears over places, a mean; tokens [B, T]."""

    def __init__(self, padding: int | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 12, padding_idx=padding)
        self.first = nn.Linear(12, 16)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(F.gelu(self.norm(self.first(self.embed(tokens)))).mean(1))


@pytest.mark.parametrize("bound", [0.05, 0.5, 50.0])
def test_text_model_equals_opacus(bound: float) -> None:
    tokens = torch.randint(0, 40, (6, 9), generator=torch.Generator().manual_seed(3))
    tokens[:, 6:] = 0
    compare(models.seeded(Words), [tokens], classes(6), bound=bound)


def test_padding_of_an_embedding_has_no_gradient() -> None:
    """As in torch. Opacus gives it one, so this is no comparison with it."""
    model, tokens = models.seeded(lambda: Words(padding=0)), torch.randint(0, 4, (6, 9))
    compiled, _, _ = made_private(model, 7)
    sums = clipped_sums(compiled, [tokens])
    assert not sums["embed.weight"][0].any() and sums["embed.weight"][1].any()
    assert_close(sums, reference_sums(model, [tokens]))


# FP4. The dpquant operators have no vmap rule (they read the policy at run time), so vmap(grad) cannot run them;
# the reference takes one sample at a time, each with the bits of its own id.

SHAPES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "residual": (models.GroupNormNet, lambda: torch.randn(4, 3, 8, 8)),
    "text": (models.TextNet, lambda: torch.randint(0, 11, (4, 6))),
}


def test_dpquant_operators_have_no_vmap_rule() -> None:
    compiled = dpq.compile(models.seeded(models.TextNet), budget=0, backend="reference").train()
    compiled(torch.randint(0, 11, (2, 6)))
    variant = compiled.variant("all")
    with pytest.raises(RuntimeError):
        torch.func.vmap(lambda x: variant(x[None]))(torch.randint(0, 11, (2, 6)))


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("format", few(["luq_fp4", "fp4_e2m1"], "luq_fp4"))
def test_fp4_equals_the_reference_sample_by_sample(name: str, format: str) -> None:
    make, batch = SHAPES[name]
    model, x, ids = models.seeded(make), batch(), torch.tensor([7, 100_000, 3, 12])
    compiled, _, _ = made_private(model, 5, policy="all", format=format)
    compiled.sample_ids = ids
    expected = reference_sums(model, [x], policy="all", format=format, ids=ids)
    assert_close(clipped_sums(compiled, [x]), expected)
    plain = reference_sums(model, [x], policy="none")
    assert any((plain[n] - value).norm() > 0.02 * value.norm() for n, value in expected.items())  # FP4 it was


# Stock Opacus around a compiled model


NARROW = pytest.mark.filterwarnings("ignore:Secure RNG turned off")  # Opacus' own engine, each time it is made


@NARROW
@pytest.mark.parametrize("wrap", [True, False])
@pytest.mark.parametrize("mode", ["hooks", "ghost", "functorch", "ew"])
def test_stock_opacus_never_trains_a_compiled_model(mode: str, wrap: bool) -> None:
    if mode == "ew" and not wrap:
        pytest.skip("Opacus has no expanded weights without a wrapper")
    compiled = compiled_net()
    module, optimizer, *_ = opacus.PrivacyEngine(accountant="rdp").make_private(
        module=compiled,
        optimizer=torch.optim.SGD(compiled.parameters(), lr=0.1),
        criterion=nn.CrossEntropyLoss(),
        data_loader=plain_loader(),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        grad_sample_mode=mode,
        wrap_model=wrap,
    )
    before = models.state(compiled)
    with pytest.raises(PrivateTrainingError, match=r"another engine.*Fix: use dpquant_compile\.PrivacyEngine"):
        (module if wrap else compiled)(torch.randn(3, FEATURES))
    with pytest.raises((ValueError, AttributeError), match=r"Per sample gradient|NoneType"):
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in compiled.named_parameters())


@NARROW
def test_grad_sample_module_around_a_compiled_model_is_refused() -> None:
    wrapped = opacus.GradSampleModule(compiled_net())
    with pytest.raises(PrivateTrainingError, match=r"'body\.weight' was prepared.*dpquant_compile\.PrivacyEngine"):
        wrapped(torch.randn(3, FEATURES))
    freed = wrapped.to_standard_module()  # takes its hooks off again
    freed(torch.randn(3, FEATURES)).sum().backward()
    assert freed.fc.weight.grad is not None


@pytest.mark.parametrize("physical", [4, None])
def test_batch_memory_manager_is_refused(physical: int | None) -> None:
    run = made(max_physical_batch_size=physical)
    manager = BatchMemoryManager(data_loader=run.loader, max_physical_batch_size=2, optimizer=run.optimizer)
    with pytest.raises(PrivateTrainingError, match="max_physical_batch_size"), manager as loader:
        train(run._replace(loader=loader))
    assert not run.engine.accountant.history


# Inductor


@pytest.fixture(scope="module")
def inductor() -> Run:
    """One run by Inductor for the tests that look at what was compiled."""
    return made(compile_options=dict(backend="auto", inner="inductor"), optimizer=still, max_physical_batch_size=4)


def test_nothing_is_compiled_anew_for_sizes_and_policies(inductor: Run) -> None:
    logical_sums(inductor)
    compiled = len(inductor.model.compiled_graphs)
    assert compiled == 2  # a forward and a backward
    sizes = set()
    for policy in ("all", "none", ["fc"]):
        inductor.model.set_policy(policy)
        for x, y in inductor.loader:
            sizes.add(len(x))
            inductor.criterion(inductor.model(x), y).backward()
            inductor.optimizer.step()
    assert len(sizes) > 2 and len(inductor.model.compiled_graphs) == compiled


@pytest.mark.parametrize("policy", ["none", "all"])
def test_inductor_equals_eager(inductor: Run, policy: str) -> None:
    eager = made(optimizer=still, policy=policy, max_physical_batch_size=4)
    inductor.model.set_policy(policy)
    x, y = dataset(4).tensors
    for run in (eager, inductor):
        run.engine.session.announce(None)  # type: ignore[union-attr]
        run.model.step = 5
        run.criterion(run.model(x), y).backward()
    assert_same(sums_of(inductor.model), sums_of(eager.model))


class Repeated(nn.Module):
    """What its backward needs has strides that Inductor would choose otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.relu(self.conv(x.repeat(1, 3, 1, 1))).mean((2, 3)))


def test_saved_tensors_keep_the_strides_of_the_trace() -> None:
    model, x = models.seeded(Repeated), torch.randn(4, 1, 6, 6)
    sums = [clipped_sums(made_private(copy.deepcopy(model), 4, inner=inner)[0], [x]) for inner in ("eager", "inductor")]
    assert_same(sums[1], sums[0])


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.c(torch.tanh(self.b(torch.tanh(self.a(self.norm(x))))))


@pytest.mark.heavy  # test_cut_regions compares the same without Inductor
def test_regions_give_the_sums_of_the_whole_program() -> None:
    net, x = models.seeded(lambda: nn.Sequential(*(Layer() for _ in range(4)), nn.Linear(4, 2))), torch.randn(4, 4)
    runs = [made_private(copy.deepcopy(net), 4, inner=inner)[0] for inner in ("eager", "regions")]
    whole, regions = (clipped_sums(run, [x]) for run in runs)
    assert_same(regions, whole)
    calls = [len(re.findall(r"= self\.region_", r.after)) for r in runs[1].trace_log() if r.name == "cut_regions"]
    programs = [len(called_programs(r.after)) for r in runs[1].trace_log() if r.name == "cut_regions"]
    assert len(calls) == 2 and all(count < called for count, called in zip(programs, calls, strict=True))
