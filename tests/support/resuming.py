"""What the tests of checkpoints share: a small run, its epochs, and what two of them are compared by."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpquant_compile as dpq
from tests.support.private import coarsest
from tests.support.reused import as_new

EPOCHS, STEPS, DELTA = 5, 4, 1e-5
Tell = Callable[[str], object]


class Net(nn.Module):
    """Four sites, and dropout, whose masks come from torch's global generator; [B, 6] to 3 classes."""

    def __init__(self, width: int = 8, frozen: int = 4) -> None:
        super().__init__()
        self.body, self.drop = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width)), nn.Dropout(0.2)
        self.side, self.fc = nn.Linear(6, width), nn.Linear(width, 3)
        self.register_buffer("table", torch.ones(frozen))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.drop(torch.relu(self.body(x) + self.side(x)))) * self.table.mean()


def _model_of(make: Callable[[], nn.Module], options: dict[str, Any]) -> dpq.CompiledModule:
    given = {"budget": 2, "backend": "reference", "inner": "eager", **coarsest(options)}

    def seeded() -> nn.Module:
        torch.manual_seed(5)
        return make()

    return as_new((make, repr(sorted(options.items()))), seeded, lambda original: dpq.compile(original, **given))


def engine_of(
    folder: Path | None = None,
    *,
    model: Callable[[], nn.Module] = Net,
    samples: int = 48,
    secure: bool = False,
    optimizer: Callable[[Any], Any] = lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9),
    compile_options: dict[str, Any] | None = None,
    schedule: dict[str, Any] | None = None,
    **options: Any,
) -> dpq.PrivacyEngine:
    """A run before its first step; with `schedule` None it has no scheduler."""
    compiled = _model_of(model, compile_options or {})
    path = None if folder is None else folder / "ledger.json"
    engine = dpq.PrivacyEngine(accountant="rdp", secure_mode=secure, ledger_path=path)
    x = torch.randn(samples, 6, generator=torch.Generator().manual_seed(1))
    engine.make_private(
        module=compiled.train(),
        optimizer=optimizer(compiled.parameters()),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(
            TensorDataset(x, (x[:, 0] > 0).long()), batch_size=12, generator=torch.Generator().manual_seed(2)
        ),
        **{"noise_multiplier": 1.0, "max_grad_norm": 0.5, "max_physical_batch_size": 8, **options},
        **({} if secure else {"noise_generator": torch.Generator().manual_seed(3)}),
    )
    if schedule is not None:
        dpq.Scheduler(engine, **{"epochs": EPOCHS, "n_interval": 1, "n_sample": 4, **schedule})
    return engine


def epoch(engine: dpq.PrivacyEngine, tell: Tell = lambda word: None) -> None:
    """One epoch and the scheduler's step; each thing that is done is told to whoever watches."""
    made = engine.run
    for x, y in made.loader:
        made.optimizer.zero_grad()
        made.criterion(made.session.model(x), y).backward()
        made.optimizer.step()
        tell("step")
    if engine.scheduler is not None:
        engine.scheduler.step()
        tell("scheduled")


def result_of(engine: dpq.PrivacyEngine) -> dict[str, Any]:
    """What two runs are compared by, without what names them; a copy, since training goes on in the same tensors."""
    state = copy.deepcopy(engine.state_dict())
    ledger = {"entries": [repr(entry) for entry in engine.ledger.entries], "epsilon": engine.get_epsilon(DELTA)}
    return {**{name: state[name] for name in state if name != "ledger"}, "ledger": ledger}


def same(a: Any, b: Any) -> bool:
    """Equality of nested plain data, tensors bit for bit."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def made_private_again(engine: dpq.PrivacyEngine, lr: float = 0.2) -> None:
    """`make_private` as `engine_of` did it: the noise is at its beginning again."""
    made = engine.run
    engine.make_private(
        module=made.session.model,
        optimizer=torch.optim.SGD(made.session.model.parameters(), lr=lr, momentum=0.9),
        criterion=torch.nn.CrossEntropyLoss(),
        data_loader=DataLoader(made.loader.dataset, batch_size=12, generator=torch.Generator().manual_seed(2)),
        noise_multiplier=1.0,
        max_grad_norm=0.5,
        max_physical_batch_size=8,
        noise_generator=torch.Generator().manual_seed(3),
    )
