"""Models as people write them, unmodified: torchvision's, Hugging Face's BERT, and what only Dynamo can capture.

All on the reference backend, where the compiled model and the original must agree to the last bit.
"""

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dpquant_compile as dpq
from dpquant_compile import torchvision_compat
from dpquant_compile.errors import BudgetError, CompileSpecError, NotCapturedError, SiteError
from tests.support.heavy import few
from tests.support.models import Branch, Functional, GroupNormNet, TextNet, Transposed, seeded

torchvision_models = torchvision_compat.models()  # before transformers is imported
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
ROWS = IMAGES[:, 0, 0, :4]


def small_vit() -> nn.Module:
    return torchvision_models.VisionTransformer(32, 8, 2, 2, 16, 32, dropout=0.1, num_classes=10)


# name: how to make it, number of sites
ZOO: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "resnet18": (torchvision_models.resnet18, 21),
    "resnet50": (torchvision_models.resnet50, 54),
    "densenet121": (torchvision_models.densenet121, 121),
    "mobilenet_v2": (torchvision_models.mobilenet_v2, 53),
    "vgg11": (torchvision_models.vgg11, 11),
    "vit": (small_vit, 10),
}


def reference(model: nn.Module, budget: float = 0.5, **options: Any) -> dpq.CompiledModule:
    return dpq.compile(model, budget, backend="reference", **options)


@pytest.fixture(scope="module", params=few(ZOO, *(name for name in ZOO if name != "densenet121")))
def zoo(request: pytest.FixtureRequest) -> tuple[str, nn.Module, dpq.CompiledModule]:
    """An untouched model, and a compiled copy of it."""
    torch.manual_seed(0)
    original = ZOO[request.param][0]()
    if request.param == "vit":
        nn.init.normal_(original.heads.head.weight)  # zeros by default, which would hide everything before them
    return request.param, original, reference(copy.deepcopy(original))


def results(call: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
    """Outputs, gradients and buffers of one training step, with the global generator in a known state."""
    model.zero_grad()
    torch.manual_seed(3)
    out = call(*args, **kwargs)
    out = out if isinstance(out, Tensor) else out["logits"]
    (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"out": out.detach(), **grads, **{name: b.clone() for name, b in model.named_buffers()}}


def differing(first: dict[str, Tensor], second: dict[str, Tensor]) -> list[str]:
    assert first.keys() == second.keys()
    return [name for name in first if not torch.equal(first[name], second[name])]


@pytest.mark.slow
def test_every_conv_and_linear_is_a_site(zoo: tuple[str, nn.Module, dpq.CompiledModule]) -> None:
    name, original, model = zoo
    assert len(model.sites) == ZOO[name][1]
    layers = [n for n, m in original.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    listed = [row.site for row in model.explain()]
    assert name == "vit" or list(model.sites.names) == layers
    assert {n.rpartition(".out_proj")[0] or n for n in layers} <= {n.rpartition(".out_proj")[0] or n for n in listed}
    assert len(model.policy) == model.budget


@pytest.mark.slow
def test_policy_none_is_the_original_bit_for_bit(zoo: tuple[str, nn.Module, dpq.CompiledModule]) -> None:
    _, original, model = zoo
    model.set_policy("none")
    assert not differing(results(model, model, IMAGES), results(original, original, IMAGES))


@pytest.mark.slow
def test_policy_all_is_its_variant_bit_for_bit(zoo: tuple[str, nn.Module, dpq.CompiledModule]) -> None:
    name, _, model = zoo
    # Rounding VGG's 120 million weights of linears in plain torch would take minutes; of deep models, every ninth site.
    names = [site.name for site in model.sites if site.name not in ("classifier.0", "classifier.3") or name != "vgg11"]
    policy = names if len(names) < 30 else names[::9]
    model.set_policy(policy)
    before = copy.deepcopy(dict(model.named_buffers()))
    switched = results(model, model, IMAGES)
    for key, buffer in model.named_buffers():
        buffer.copy_(before[key])
    special = results(model.variant(policy), model, IMAGES)
    assert not differing(switched, special)
    model.set_policy("none")
    assert "out" in differing(switched, results(model, model, IMAGES))


def test_vit_b_16_has_four_linears_a_block_and_two_more() -> None:
    with torch.device("meta"):
        model = torchvision_models.vit_b_16()
    compiled = reference(model)
    assert len(compiled.sites) == 12 * 4 + 2
    assert Counter(site.op for site in compiled.sites) == {"linear": 49, "conv2d": 1}


# BERT, which only Dynamo captures


@pytest.fixture(scope="module")
def bert() -> tuple[nn.Module, dpq.CompiledModule]:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=20,
        num_labels=3,
    )
    torch.manual_seed(0)
    original = BertForSequenceClassification(config)
    original.train()
    return original, reference(copy.deepcopy(original))


def tokens(length: int = 7, batch: int = 3) -> dict[str, Tensor]:
    ids = torch.arange(batch * length).reshape(batch, length) % 50
    return {"input_ids": ids, "attention_mask": (torch.arange(length) < length - 1).long().repeat(batch, 1)}


@pytest.mark.slow
def test_bert_knows_its_sites_before_it_is_captured(bert: tuple[nn.Module, dpq.CompiledModule]) -> None:
    _, model = bert
    wanted = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    assert list(model.sites.names) == wanted and len(wanted) == 2 * 6 + 2
    fresh = copy.deepcopy(model)
    with pytest.raises(NotCapturedError, match="example_inputs"):
        fresh.variant("all")
    fresh(**tokens())
    assert list(fresh.sites.names) == wanted


@pytest.mark.slow
def test_bert_in_full_precision_is_the_original_bit_for_bit(bert: tuple[nn.Module, dpq.CompiledModule]) -> None:
    original, model = bert
    model.set_policy("none")
    # Other lengths, batch sizes and arguments are other signatures of the same model.
    for kwargs in (tokens(), tokens(5), tokens(7, 4), {"input_ids": tokens()["input_ids"]}, tokens(7, 2)):
        assert not differing(results(model, model, **kwargs), results(original, original, **kwargs))
    assert type(model(**tokens())) is type(original(**tokens()))


@pytest.mark.slow
def test_bert_in_low_precision_is_its_variant_bit_for_bit(bert: tuple[nn.Module, dpq.CompiledModule]) -> None:
    _, model = bert
    model.set_policy("all")
    switched = results(model, model, **tokens())
    assert not differing(switched, results(model.variant("all"), model, **tokens()))


# What is known, and when


def test_example_inputs_capture_at_once() -> None:
    with pytest.raises(NotCapturedError):
        reference(seeded(Branch)).variant()
    for given in ((ROWS,), [ROWS], {"x": ROWS}):
        model = reference(seeded(Branch), example_inputs=given)
        assert "low_precision_site" in model.variant("all").code
        assert model.sites["first"].input_shape == (2, 4) and model.sites["first"].flops == 2 * 4 * 4


def test_another_length_gives_the_right_result() -> None:
    original = seeded(TextNet)
    model = reference(copy.deepcopy(original))
    model.set_policy("none")
    for length in (5, 3, 1, 8):
        batch = torch.arange(3 * length).reshape(3, length) % 11
        assert torch.equal(model(batch), original(batch))


@pytest.mark.parametrize("budget", [-1, 7, 1.5, -0.1, float("nan"), True, "6", None])
def test_a_budget_that_does_not_fit_is_refused(budget: Any) -> None:
    with pytest.raises(BudgetError, match=r"budget=.*6 sites"):
        reference(seeded(GroupNormNet), budget)


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(BudgetError, match="nothing to quantize"):
        reference(nn.Sequential(nn.ReLU()))
    with pytest.raises(CompileSpecError, match="not a torch"):
        reference(torch.relu)
    with pytest.raises(CompileSpecError, match="already"):
        reference(reference(seeded(GroupNormNet)))
    with pytest.raises(SiteError, match="no such site: nowhere"):
        reference(seeded(GroupNormNet)).set_policy(["nowhere"])


class Two(nn.Module):
    """One layer is called, the other is not; input [B, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def test_a_layer_that_is_never_called_is_listed_with_the_reason() -> None:
    model = reference(Two())
    model(ROWS)
    assert {row.site: row.precision for row in model.explain()}["unused"] == "skipped"


def test_explain_gives_a_row_and_a_reason_for_everything() -> None:
    model = reference(seeded(Transposed), 1)
    model(torch.randn(2, 2, 6, 6))
    down, up = model.explain()
    assert (down.site, down.precision, down.kernel) == ("down", "low", "reference (emulated)")
    assert (up.site, up.precision) == ("up", "skipped") and "transposed" in up.note
    model.eval()
    assert next(iter(model.explain())).precision == "full" and "eval()" in str(model.explain())
    chosen = reference(seeded(GroupNormNet), 1, sites=nn.Linear)
    assert [r.site for r in chosen.explain() if r.precision == "skipped"] == [
        *("stem", "blocks.0.conv1", "blocks.0.conv2", "blocks.1.conv1", "blocks.1.conv2")
    ]
    assert all("not selected" in r.note for r in chosen.explain() if r.precision == "skipped")
    assert {row.site for row in reference(seeded(Functional)).explain()} >= {"kernel", "table"}


def test_diff_shows_the_one_site_that_differs() -> None:
    model = reference(seeded(GroupNormNet))
    lines = model.diff("none", ["fc"]).splitlines()
    changed = [line for line in lines if line[0] in "+-" and "site" in line]
    assert lines[0] == "--- policy none" and lines[1] == "+++ policy 1of6:20"
    assert len(changed) == 1 and "low_precision_site" in changed[0]
    assert model.diff("all", "all") == ""


def test_the_trace_log_holds_every_pass(capfd: pytest.CaptureFixture[str]) -> None:
    model = reference(seeded(GroupNormNet))
    model(torch.randn(2, 3, 8, 8))
    names = [record.name for record in model.trace_log()]
    assert names[-1] == "insert_switches" and {"inline_modules", "functionalize", "mark_sites"} <= set(names)
    assert "dpquant.site" in str(model.trace_log()[-1]) and "# before" in str(model.trace_log()[-1])
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(("value", "printed"), [("1", True), ("0", False)])
def test_the_environment_switches_tracing_on(
    value: str, printed: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DPQUANT_TRACE", value)
    reference(nn.Sequential(nn.Linear(2, 2)))
    assert ("→ mark_sites" in capfd.readouterr().err) is printed


def test_the_graph_can_be_drawn(tmp_path: Path) -> None:
    model = reference(seeded(GroupNormNet))
    assert model.draw(tmp_path / "graph.svg").read_text().lstrip().startswith("<")
    page = model.save_html(tmp_path / "graph.html", ["none", ["fc"], "all"]).read_text()
    assert "blocks.1.conv2" in page
    graph = model.graph_view().to_networkx()
    low = {data["site"] for _, data in graph.nodes(data=True) if data["precision"] == "low"}
    assert low == model.policy


# Arguments and outputs


def pair(make: Callable[[], nn.Module]) -> tuple[nn.Module, dpq.CompiledModule]:
    original = seeded(make)
    model = reference(copy.deepcopy(original))
    model.set_policy("none")
    return original, model


def equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


class Keywords(nn.Module):
    """Arguments by position and by name, and several outputs; input [B, 4]."""

    def __init__(self, kind: str = "tuple", dynamic: bool = False) -> None:
        super().__init__()
        self.fc, self.kind, self.dynamic = nn.Linear(4, 4), kind, dynamic

    def forward(self, x: Tensor, *, scale: float = 2.0) -> Any:
        y = self.fc(x)
        if self.dynamic and y.shape[1] > 3:
            y = y.relu()
        if self.kind == "dict":
            return {"y": y * scale, "more": [y, (x, None)]}
        return Pair(y * scale, y) if self.kind == "dataclass" else (y * scale, [y])


@dataclass
class Pair:
    scaled: Tensor
    plain: Tensor


def leaves(result: Any) -> list[Tensor]:
    if isinstance(result, Pair):
        return [result.scaled, result.plain]
    return [leaf for leaf in torch.utils._pytree.tree_leaves(result) if leaf is not None]


@pytest.mark.parametrize("dynamic", [False, True], ids=["fx", "dynamo"])
@pytest.mark.parametrize("kind", ["tuple", "dict", "dataclass"])
def test_arguments_and_outputs_keep_their_form(kind: str, dynamic: bool, request: pytest.FixtureRequest) -> None:
    if kind == "dataclass" and dynamic:
        request.applymarker(pytest.mark.xfail(strict=True, reason="Dynamo's export takes no dataclass as output"))
    original, model = pair(lambda: Keywords(kind, dynamic))
    for kwargs in ({}, {"scale": 3.0}):
        ours, theirs = model(x=ROWS, **kwargs), original(ROWS, **kwargs)
        assert type(ours) is type(theirs) and equal(leaves(ours), leaves(theirs))


class Optional(nn.Module):
    """Another layer when an argument is given; input [B, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.without, self.given = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.without(x) if mask is None else self.given(x) * mask


def test_an_optional_argument_may_be_left_out() -> None:
    original, model = pair(Optional)
    assert torch.equal(model(ROWS, ROWS), original(ROWS, ROWS))
    assert torch.equal(model(ROWS), original(ROWS))
