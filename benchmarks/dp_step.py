"""One private training step: ours against non-private training and Opacus, in one run.

    python benchmarks/dp_step.py                         # ResNet18 with GroupNorm, three configurations; GPT-2, two
    python benchmarks/dp_step.py --config gpt2,128,8     # GPT-2, all weights; gpt2_lora: adapters of rank 8 on c_attn
    python benchmarks/dp_step.py --smoke                 # a small CNN, half a minute
    python benchmarks/dp_step.py --smoke --config small_gpt2,8,4 --config small_gpt2_lora,8,4

Times are medians over repeats that alternate between the contestants, on two threads: forward, backward and clipping
in one column, noise and the optimizer's step in the other. Peak memory is the high-water mark of resident memory over
a step after the first, each contestant in a process of its own; "net" is what that lies above the process before its
model. "ours int4" is the default recipe at nine tenths of the sites, "ours int8" that recipe at all of them, "ours
bfloat16" is `high="bfloat16"` with no site low, "eager bfloat16" is plain training under torch.autocast. GPT-2 has
random weights, twelve layers of width 768, its vocabulary of 50,257 and its tied head. A contestant that cannot train
a model has its reason in the table.
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import opacus
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpquant_compile as dpq
from dpquant_compile import torchvision_compat

CLASSES = 10
PLAIN = ("eager", "eager bfloat16", "torch.compile")
OURS = ("ours", "ours bfloat16", "ours int8", "ours int4")
CONTESTANTS = (*PLAIN, "hooks", "ghost", "functorch", *OURS)
IMAGES = tuple(kind for kind in CONTESTANTS if kind not in ("ours int8", "ours int4"))
NUMERICS: dict[str, dict[str, Any]] = {
    "ours bfloat16": {"budget": 0, "high": "bfloat16"},
    "ours int8": {"budget": 1.0, "recipe": "int8"},
    "ours int4": {"budget": 0.9},
}
LANGUAGE = tuple(kind for kind in CONTESTANTS if kind not in ("functorch", "ours int8"))


@dataclass(frozen=True)
class Config:
    """A model, the size of its images or the length of its sequences, and the physical batch."""

    model: str
    size: int
    batch: int

    def __str__(self) -> str:
        return f"{self.model} {self.size}{'' if self.language else f'×{self.size}'}, batch {self.batch}"

    @property
    def language(self) -> bool:
        """Whether it is a language model."""
        return "gpt2" in self.model

    @property
    def kinds(self) -> tuple[str, ...]:
        """The contestants by default."""
        return LANGUAGE if self.language else IMAGES

    @property
    def inner(self) -> str:
        """What compiles it: for the smoke run, of which times say nothing, what is quick to start."""
        return "aot_eager" if self.model.startswith("small") else "inductor"


@dataclass(frozen=True)
class Contestant:
    """The two halves of a training step."""

    gradients: Callable[[], None]
    step: Callable[[], None]


class LanguageModel(nn.Module):
    """GPT-2: logits of tokens. With `positions` it is given them for each sample, as Opacus needs."""

    def __init__(self, config: Config, positions: bool) -> None:
        super().__init__()
        torchvision_compat.models()  # before transformers, which imports torchvision
        import transformers

        small = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 31, "n_positions": 16}
        quiet: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
        shape: dict[str, Any] = small | {"bos_token_id": 0, "eos_token_id": 0} if "small" in config.model else {}
        model: Any = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, **quiet))
        if config.model.endswith("_lora"):
            import peft

            adapters = peft.LoraConfig(r=8, target_modules=["c_attn"], lora_dropout=0.0, fan_in_fan_out=True)
            model = peft.get_peft_model(model, adapters)
        self.model, self.positions = model, positions

    def forward(self, tokens: Tensor) -> Tensor:
        places = {"position_ids": torch.arange(tokens.shape[1]).expand(tokens.shape)} if self.positions else {}
        logits: Tensor = self.model(input_ids=tokens, **places).logits
        return logits


class SequenceLoss(nn.Module):
    """The mean loss of the next token, for each sequence."""

    reduction = "mean"

    def forward(self, logits: Tensor, tokens: Tensor) -> Tensor:
        each = F.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none").mean(1)
        return each if self.reduction == "none" else each.mean()


def build(config: Config, inplace: bool = True) -> nn.Module:
    """The model, with the same weights each time."""
    torch.manual_seed(0)
    if config.language:
        return LanguageModel(config, positions=not inplace)
    if config.model == "small":
        layers = (nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.Flatten())
        return nn.Sequential(*layers, nn.Linear(16 * config.size**2, CLASSES))
    model: nn.Module = getattr(torchvision_compat.models(), config.model)(
        num_classes=CLASSES, norm_layer=lambda width: nn.GroupNorm(min(32, width), width)
    )
    if not inplace:
        _without_inplace(model)
    return model


def _without_inplace(model: nn.Module) -> None:
    """What Opacus needs: no in-place ReLU, and no `out += identity` in torchvision's blocks."""
    for module in model.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False
        if type(module).__name__ == "BasicBlock":
            module.__class__ = type("BasicBlock", (type(module),), {"forward": _block_forward})


def _block_forward(self: Any, x: Tensor) -> Tensor:
    identity = x if self.downsample is None else self.downsample(x)
    out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
    result: Tensor = self.relu(out + identity)
    return result


def contestant(kind: str, config: Config) -> Contestant:
    """A training step of one kind, on one fixed batch."""
    generator = torch.Generator().manual_seed(1)
    if config.language:
        x = y = torch.randint(
            0, 31 if "small" in config.model else 50257, (config.batch, config.size), generator=generator
        )
    else:
        x = torch.randn(config.batch, 3, config.size, config.size, generator=generator)
        y = torch.randint(0, CLASSES, (config.batch,), generator=generator)
    model = build(config, inplace=kind in (*PLAIN, *OURS)).train()
    optimizer: Any = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    criterion: Any = SequenceLoss() if config.language else nn.CrossEntropyLoss()
    if kind in PLAIN:
        call: Any = torch.compile(model, backend=config.inner) if kind == "torch.compile" else model

        def plain() -> None:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=kind == "eager bfloat16"):
                loss = criterion(call(x), y)
            loss.backward()

        return Contestant(plain, lambda: optimizer.step())
    loader = DataLoader(TensorDataset(x, y), batch_size=config.batch)
    common: dict[str, Any] = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "poisson_sampling": False}
    common["data_loader"] = loader
    if kind in OURS:
        numerics: dict[str, Any] = NUMERICS.get(kind, {"budget": 0})
        compiled = dpq.compile(model, inner=config.inner, **numerics)
        private, optimizer, criterion, _ = dpq.PrivacyEngine(accountant="rdp").make_private(
            module=compiled, optimizer=optimizer, criterion=criterion, max_physical_batch_size=config.batch, **common
        )
    else:
        made = opacus.PrivacyEngine(accountant="rdp").make_private(
            module=model, optimizer=optimizer, criterion=criterion, grad_sample_mode=kind, **common
        )
        private, optimizer = made[:2]
        criterion = made[2] if kind == "ghost" else criterion
    private.train()

    def gradients() -> None:
        optimizer.zero_grad()
        criterion(private(x), y).backward()
        if kind == "ghost":
            optimizer.accumulate()  # its backward has clipped
        elif kind not in OURS:
            optimizer.clip_and_accumulate()

    def step() -> None:
        if kind not in OURS:
            optimizer.add_noise()
            optimizer.scale_grad()
            optimizer.original_optimizer.step()
        else:
            optimizer.step()

    return Contestant(gradients, step)


def timed(function: Callable[[], None]) -> float:
    """Milliseconds of one call."""
    start = time.perf_counter()
    function()
    return (time.perf_counter() - start) * 1e3


def measure(
    config: Config, kinds: tuple[str, ...], repeats: int
) -> tuple[dict[str, dict[str, list[float]]], dict[str, str]]:
    """Times of all contestants, taken in turn, and why some cannot take part. A slow one has fewer turns: three, or
    one if it is very slow."""
    made, warm, failed = dict[str, Contestant](), dict[str, float](), dict[str, str]()
    for kind in kinds:
        try:
            made[kind] = contestant(kind, config)
            for _ in range(1 if kind == "functorch" else 2):
                warm[kind] = timed(made[kind].gradients) + timed(made[kind].step)
        except Exception as error:  # of Opacus, which raises many types for models that it does not support
            if kind not in ("hooks", "ghost", "functorch"):
                raise
            made.pop(kind, None)
            failed[kind] = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    times: dict[str, dict[str, list[float]]] = {kind: {"gradients": [], "step": []} for kind in made}
    quickest = min(warm.values())
    for turn in range(repeats):
        for kind, one in made.items():
            every = repeats if warm[kind] > 50 * quickest else max(1, repeats // 3) if warm[kind] > 8 * quickest else 1
            if turn % every:
                continue
            times[kind]["gradients"].append(timed(one.gradients))
            times[kind]["step"].append(timed(one.step))
    return times, failed


def _status(key: str) -> float:
    """A figure of this process' memory, in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) / 1024
    raise KeyError(key)


def peak_memory(kind: str, config: Config) -> dict[str, float]:
    """Peak resident memory of a step of one contestant after a first one; run in a fresh process."""
    torchvision_compat.models()
    gc.collect()
    before = _status("VmRSS")
    one = contestant(kind, config)
    one.gradients()
    one.step()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # start the high-water mark anew: compilation is not a step
    one.gradients()
    one.step()
    return {"peak": _status("VmHWM"), "net": _status("VmHWM") - before}


def in_child(kind: str, config: Config, threads: int) -> dict[str, float]:
    """`peak_memory` in a process of its own, which finds its programs compiled."""
    command = [sys.executable, __file__, "--child", kind, "--threads", str(threads)]
    command += ["--config", f"{config.model},{config.size},{config.batch}"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    figures: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return figures


def report(config: Config, times: dict[str, Any], failed: dict[str, str], memory: dict[str, Any]) -> dict[str, Any]:
    """Print one configuration's table; the figures come back for the file."""
    print(f"\n{config}")
    head = ("", "fwd+bwd+clip ms", "noise+step ms", "to eager", "to ours", "peak MiB", "net MiB")
    print("{:<15}{:>20}{:>18}{:>10}{:>9}{:>10}{:>9}".format(*head))
    middle = {kind: statistics.median(t["gradients"]) for kind, t in times.items()}
    figures: dict[str, Any] = {}
    for kind, taken in times.items():
        cells = []
        for part in ("gradients", "step"):
            spread = (max(taken[part]) - min(taken[part])) / 2
            cells.append(f"{statistics.median(taken[part]):.1f} ± {spread:.1f}")
        held = memory.get(kind, {})
        figures[kind] = {
            "gradients_ms": middle[kind],
            "step_ms": statistics.median(taken["step"]),
            "repeats": len(taken["gradients"]),
            "to_eager": middle[kind] / middle["eager"],
            "to_ours": middle[kind] / middle["ours"],
            **held,
        }
        ratios = f"{figures[kind]['to_eager']:>9.2f}×{figures[kind]['to_ours']:>8.2f}×"
        sizes = f"{held['peak']:>10.0f}{held['net']:>9.0f}" if held else ""
        print(f"{kind:<15}{cells[0]:>20}{cells[1]:>18}{ratios}{sizes}", flush=True)
    for kind, reason in failed.items():
        print(f"{kind:<15}cannot train this model: {reason}")
        figures[kind] = {"failed": reason}
    return figures


def main() -> None:
    """Measure every configuration and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", action="append", help="model,size,batch; may be given again")
    parser.add_argument("--kinds", help=f"contestants, with commas between them: {', '.join(CONTESTANTS)}")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--child", choices=CONTESTANTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message="Secure RNG turned off")
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    torch.set_num_threads(args.threads)
    large = ["resnet18,32,64", "resnet18,32,128", "resnet18,64,32", "gpt2,128,8", "gpt2_lora,128,8"]
    asked = args.config or (["small,8,16"] if args.smoke else large)
    configs = [Config(name, int(size), int(batch)) for name, size, batch in (text.split(",") for text in asked)]
    if args.child:
        print(json.dumps(peak_memory(args.child, configs[0])))
        return
    results = {}
    for config in configs:
        kinds = tuple(args.kinds.split(",")) if args.kinds else config.kinds
        times, failed = measure(config, kinds, 2 if args.smoke else args.repeats)
        memory = {} if args.no_memory else {kind: in_child(kind, config, args.threads) for kind in times}
        results[str(config)] = report(config, times, failed, memory)
    if args.json:
        args.json.write_text(json.dumps({"threads": args.threads, "torch": torch.__version__, **results}, indent=1))


if __name__ == "__main__":
    main()
