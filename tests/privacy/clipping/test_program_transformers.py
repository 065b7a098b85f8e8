"""Language models as transformers and peft make them: sites, clipped gradients, adapters and what they offer."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpquant_compile import torchvision_compat
from dpquant_compile.errors import PrivateTrainingError
from tests.support.heavy import few
from tests.support.private import assert_close, clipped_sums, made_private, reference_sums

torchvision_compat.models()  # before transformers, which imports torchvision
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),  # peft and transformers disagree on it
]

LAYERS = "h.0.attn.c_attn h.0.attn.c_proj h.0.mlp.c_fc h.0.mlp.c_proj".split()
TOKENS = torch.randint(0, 29, (4, 7), generator=torch.Generator().manual_seed(1))


class Logits(nn.Module):
    """A language model that takes tokens and gives logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=tokens).logits
        return logits


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=1, n_embd=16, n_head=2, vocab_size=29, n_positions=40, bos_token_id=0, eos_token_id=0, pad_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


def adapted() -> Any:
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.0, fan_in_fan_out=True)
    model = peft.get_peft_model(gpt2(), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # which peft starts from zero, where the other half has no gradient
            nn.init.normal_(parameter, std=0.1)
    return model


def test_gpt2_equals_the_reference_without_gradients_of_samples() -> None:
    model = Logits(gpt2())
    compiled, _, _ = made_private(model, 5, inner="eager")
    assert compiled.sites.names[:4] == tuple(f"model.transformer.{name}" for name in LAYERS)  # before any forward
    compiled.set_policy("all")
    assert_close(clipped_sums(compiled, [TOKENS]), reference_sums(model, [TOKENS], policy="all"))
    assert compiled.sites.names == (*(f"model.transformer.{name}" for name in LAYERS), "model.lm_head")
    ways = {name.removeprefix("model.transformer."): how for name, _, how in compiled.__dict__["_private"].ways()}
    assert all(ways[f"{name}.weight"] == "book-keeping (gram)" for name in LAYERS)
    assert ways["wte.weight"] == "gram over 2 uses" and ways["wpe.weight"] == "look-up"


@pytest.mark.parametrize(("make", "reentrant"), few([(gpt2, False), (adapted, True)], (gpt2, False)))
def test_checkpointing_changes_nothing(make: Any, reentrant: bool) -> None:
    model = Logits(make())
    expected = reference_sums(model, [TOKENS])
    model.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    compiled, _, _ = made_private(model, 5, inner="eager")
    assert_close(clipped_sums(compiled, [TOKENS]), expected)
    assert not compiled.sites.skipped


def test_adapters_alone_train_and_sites_have_the_modules_names() -> None:
    model = adapted()
    compiled, _, _ = made_private(model, 5, inner="eager")
    name = "base_model.model.transformer.h.0.attn.c_attn"
    compiled.set_policy([f"{name}.base_layer", f"{name}.lora_A.default"])
    logits = compiled(input_ids=TOKENS).logits
    assert {f"{name}.base_layer", f"{name}.lora_A.default", f"{name}.lora_B.default"} <= set(compiled.sites.names)
    assert set(compiled.sites.names) <= {name for name, _ in model.named_modules()}
    assert compiled.policy == {f"{name}.base_layer", f"{name}.lora_A.default"}
    torch.autograd.backward(logits, torch.ones_like(logits))
    held = [name for name, p in compiled.named_parameters() if getattr(p, "summed_grad", None) is not None]
    assert held == [f"{name}.lora_A.default.weight", f"{name}.lora_B.default.weight"]


@pytest.mark.heavy
def test_a_compiled_adapter_is_saved_generates_and_merges(tmp_path: Path) -> None:
    model = adapted()
    compiled, _, _ = made_private(model, 5, inner="eager")
    compiled(input_ids=TOKENS)
    compiled.save_pretrained(tmp_path)
    held = peft.PeftModel.from_pretrained(gpt2(), tmp_path)
    mask = torch.ones_like(TOKENS)
    plain = copy.deepcopy(model).eval()
    compiled.eval()
    for one in (compiled, held.eval()):
        made = one.generate(input_ids=TOKENS, attention_mask=mask, max_new_tokens=3, do_sample=False, use_cache=True)
        expected = plain.generate(
            input_ids=TOKENS, attention_mask=mask, max_new_tokens=3, do_sample=False, use_cache=True
        )
        assert torch.equal(made, expected)
    with torch.no_grad():
        before = compiled(input_ids=TOKENS).logits
        merged = compiled.merge_and_unload()
        assert not any("lora" in name for name, _ in merged.named_parameters())
        # Modules were replaced in the model that the compiled one shares: it captures the new ones.
        for one in (merged.eval(), compiled):
            torch.testing.assert_close(one(input_ids=TOKENS).logits, before, rtol=1e-4, atol=1e-5)
    compiled.train()
    with pytest.raises(PrivateTrainingError, match=r"is not the one that make_private took.*merge_and_unload"):
        compiled(input_ids=TOKENS)
