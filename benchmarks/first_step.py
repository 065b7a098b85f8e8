"""The first step of private training, which traces and compiles: with empty caches, and in a later process.

    python benchmarks/first_step.py                          # ResNet18 at 32×32, batch 64
    python benchmarks/first_step.py --config resnet50,64,8 --config densenet121,64,8 --config vit_b_16,224,4
    python benchmarks/first_step.py --config bert,128,8      # BERT-base, random weights, two classes
    python benchmarks/first_step.py --smoke                  # a small CNN

Each step runs in a process of its own: the first with an empty cache of Inductor, the second with what that left. "own
CPU" is the time of the process itself, without the C++ compilers that it starts; other jobs on the machine change it
less than seconds. Norm layers that mix samples are replaced by GroupNorm. "tracing" is the time from the canonical
graph to the two programs, "found" how many of these Inductor's cache held.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import opacus
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.data import DataLoader, TensorDataset

import dpquant_compile as dpq
from dpquant_compile import torchvision_compat

TRACING = ("trace_joint", "free_saved_inputs")  # the first and the last pass of a private program


class Bert(nn.Module):
    """BERT-base with two classes: logits of tokens."""

    def __init__(self) -> None:
        super().__init__()
        torchvision_compat.models()  # before transformers, which imports torchvision
        import transformers

        quiet: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        self.model: Any = transformers.BertForSequenceClassification(transformers.BertConfig(**quiet))

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=tokens).logits
        return logits


def build(name: str, size: int) -> nn.Module:
    """A model by name: "small", "bert", or one of torchvision."""
    torch.manual_seed(0)
    if name == "bert":
        return Bert()
    if name == "small":
        layers = (nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.ReLU(), nn.Flatten())
        return nn.Sequential(*layers, nn.Linear(8 * size**2, 10))
    sizes = {"image_size": size} if name.startswith("vit") else {}
    model = getattr(torchvision_compat.models(), name)(num_classes=10, **sizes)
    fixed: nn.Module = opacus.validators.ModuleValidator.fix(model)
    return fixed


def first_step(name: str, size: int, batch: int) -> dict[str, float]:
    """Seconds of the first step of this process."""
    model = dpq.compile(build(name, size).train(), budget=0)
    x = torch.zeros(batch, size, dtype=torch.int64) if name == "bert" else torch.randn(batch, 3, size, size)
    y = torch.zeros(batch, dtype=torch.int64)
    private, optimizer, criterion, _ = dpq.PrivacyEngine(accountant="rdp").make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=batch),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        max_physical_batch_size=batch,
    )
    begun, used = time.perf_counter(), time.process_time()
    criterion(private(x), y).backward()
    seconds, cpu = time.perf_counter() - begun, time.process_time() - used
    optimizer.step()
    names = [record.name for record in model.trace_log()]
    first, last = (names.index(name) for name in TRACING)
    tracing = sum(record.seconds for record in model.trace_log()[first : last + 1])
    found = counters["inductor"]["fxgraph_cache_hit"]
    return {"seconds": seconds, "own_cpu": cpu, "tracing": tracing, "found": found, "sites": len(model.sites)}


def in_child(config: str, threads: int, cache: str) -> dict[str, float]:
    """`first_step` in a process of its own, with Inductor's cache in this folder."""
    command = [sys.executable, __file__, "--child", "--config", config, "--threads", str(threads)]
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
    done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    figures: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return figures


def main() -> None:
    """Measure every configuration and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", action="append", help="model, size of images or sequences, batch; may be repeated")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message="Secure RNG turned off")
    torch.set_num_threads(args.threads)
    configs: list[str] = args.config or (["small,8,4"] if args.smoke else ["resnet18,32,64"])
    if args.child:
        name, size, batch = configs[0].split(",")
        print(json.dumps(first_step(name, int(size), int(batch))))
        return
    print("{:<22}{:>7}{:>7}{:>11}{:>9}{:>10}{:>7}".format("", "sites", "", "first step", "own CPU", "tracing", "found"))
    results: dict[str, Any] = {}
    for config in configs:
        with tempfile.TemporaryDirectory() as cache:
            for kind in ("cold", "warm"):
                figures = results.setdefault(config, {})[kind] = in_child(config, args.threads, cache)
                cells = (f"{figures[key]:.1f} s" for key in ("seconds", "own_cpu", "tracing"))
                print(
                    "{:<22}{:>7}{:>7}{:>11}{:>9}{:>10}{:>7}".format(
                        config, figures["sites"], kind, *cells, figures["found"]
                    ),
                    flush=True,
                )
    if args.json:
        args.json.write_text(json.dumps({"threads": args.threads, "torch": torch.__version__, **results}, indent=1))


if __name__ == "__main__":
    main()
