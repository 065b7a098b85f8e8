"""Federated learning: the clients of a Flower simulation train compiled models privately, and a server averages them.

    pip install -e ".[federated]"
    python examples/federated.py [--clients 3] [--rounds 8] [--epsilon 6] [--out out/federated]

Each client has handwritten digits of its own. In each round it takes the average of the last one, trains an epoch on
its records with two of three layers in four bits, and gives back its parameters. What to notice
- Parameters are private when they leave a client: clipping and noise are the client's own, so the server need not be
  trusted. No loss and no accuracy on a client's records leaves it. The number of its records does, as weight.
- Flower makes its clients anew for every message. What a client must not forget is in its folder: the ledger, which has
  every step on disk before it is made, and the checkpoint of its last round.
- secure_mode=True. Clients that begin with one seed draw one noise, and the difference of their parameters is bare; so
  is that of a round which is tried again from other parameters with the noise it had. Here noise never comes twice.
- A record is with one client, so what it pays is what that client's ledger holds, and the largest ε is that of all.
- The limit is the client's: past it a client refuses the round, whatever the server asks for, and the others go on.
  Delete no ledger while the records are the same: a second run goes on counting.

It takes about a minute. Clients compile nothing by default, since each would compile anew in every round.
"""

import argparse
import logging
import os
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpquant_compile as dpq

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")  # Flower reads it when it is imported
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else ray warns of what it will do one day

from flwr.app import ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

BATCH_SIZE, TEST_SIZE, NOISE, DELTA = 64, 360, 1.3, 1e-4


def build() -> nn.Module:
    """Three sites."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def digits() -> tuple[Tensor, Tensor]:
    """Images, scaled to [0, 1], and labels, in an order that all agree on; the first TEST_SIZE are for tests."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    return torch.tensor(data.images, dtype=torch.float32)[order] / 16, torch.tensor(data.target)[order]


def records_of(client: int, clients: int) -> TensorDataset:
    """A client's own records: the first client has one part, the second two, and so on, and none is in two of them."""
    x, y = (values[TEST_SIZE:] for values in digits())
    ends = [len(x) * k * (k + 1) // (clients * (clients + 1)) for k in (client, client + 1)]
    return TensorDataset(x[slice(*ends)], y[slice(*ends)])


def train_round(
    args: argparse.Namespace, client: int, parameters: dict[str, Tensor]
) -> tuple[dict[str, Tensor], float]:
    """One round of one client: its parameters after an epoch from those of the server, and its ε so far."""
    folder = args.out / f"client-{client}"
    folder.mkdir(parents=True, exist_ok=True)
    model = dpq.compile(build(), budget=2, inner=args.inner)
    with dpq.PrivacyEngine(
        accountant="rdp",
        secure_mode=True,
        ledger_path=folder / "ledger.json",
        target_epsilon=args.epsilon,
        target_delta=DELTA,
    ) as engine:  # closed at the end: the next round opens the ledger anew
        model, optimizer, criterion, loader = engine.make_private(
            module=model.train(),
            optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
            criterion=nn.CrossEntropyLoss(),
            data_loader=DataLoader(records_of(client, args.clients), batch_size=BATCH_SIZE),
            noise_multiplier=NOISE,
            max_grad_norm=1.0,
            max_physical_batch_size=BATCH_SIZE,
        )
        scheduler = dpq.Scheduler(engine, n_sample=1, seed=client)  # without `epochs`: rounds are not known ahead
        # The whole round or nothing of it: a round that stops on the way is paid for, and gives nothing.
        engine.ledger.check("training", q=loader.sample_rate, sigma=NOISE, steps=loader.steps)
        checkpoint = folder / "checkpoint.pt"
        if checkpoint.exists():
            engine.load_checkpoint(path=checkpoint)  # scores and policy go on; noise is new
            model.load_state_dict(parameters)
            scheduler.step()  # between two epochs, which here are rounds: measured on what will be trained
        else:
            model.load_state_dict(parameters)
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
        engine.save_checkpoint(path=checkpoint)
        return model.state_dict(), engine.get_epsilon(DELTA)


def client_app(args: argparse.Namespace) -> ClientApp:
    """The Flower client: an answer to each message that asks it to train."""

    def train(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        try:
            parameters = message.content.array_records["arrays"].to_torch_state_dict()
            state, epsilon = train_round(args, client, parameters)
        except dpq.errors.PrivacyBudgetError as error:
            return Message(Error(code=0, reason=f"client {client}: {error}"), reply_to=message)
        weight = len(records_of(client, args.clients))
        metrics = MetricRecord({"num-examples": weight, "client": client, "epsilon": epsilon})
        return Message(RecordDict({"arrays": ArrayRecord(state), "metrics": metrics}), reply_to=message)

    app = ClientApp()
    app.train()(train)
    return app


def server_app(args: argparse.Namespace) -> ServerApp:
    """The Flower server: FedAvg, and a line for each round."""
    x, y = (values[:TEST_SIZE] for values in digits())
    spent: dict[int, float] = {}
    trained: list[int] = []

    def gather(answers: list[RecordDict], weighted_by: str) -> MetricRecord:
        metrics: list[Any] = [answer.metric_records["metrics"] for answer in answers]
        trained[:] = sorted(metric["client"] for metric in metrics)
        spent.update({metric["client"]: metric["epsilon"] for metric in metrics})
        return MetricRecord({"clients": len(answers)})

    def evaluate(number: int, arrays: ArrayRecord) -> None:
        model = build().eval()
        model.load_state_dict(arrays.to_torch_state_dict())
        with torch.no_grad():
            accuracy = (model(x).argmax(1) == y).float().mean().item()
        costs = ", ".join(f"{spent[client]:.3f}" for client in sorted(spent)) or "none yet"
        who = ", ".join(map(str, trained)) or "none"
        print(f"round {number}: trained {who}; test {accuracy:.1%}; epsilon by client {costs}", flush=True)
        trained.clear()

    def main(grid: Grid, context: Context) -> None:
        torch.manual_seed(0)
        strategy = FedAvg(
            fraction_evaluate=0.0,  # on clients' records, which would not be private
            min_train_nodes=args.clients,
            min_available_nodes=args.clients,
            train_metrics_aggr_fn=gather,
        )
        initial = ArrayRecord(build().state_dict())
        strategy.start(grid=grid, initial_arrays=initial, num_rounds=args.rounds, evaluate_fn=evaluate)

    app = ServerApp()
    app.main()(main)
    return app


def main() -> None:
    """Simulate, and say what it cost each client's records."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=int, default=3, help="how many (default: 3)")
    parser.add_argument("--rounds", type=int, default=8, help="rounds of an epoch each (default: 8)")
    parser.add_argument("--epsilon", type=float, default=6.0, help="the most that a client spends (default: 6)")
    parser.add_argument("--inner", default="eager", help="inductor, aot_eager or eager (default: eager)")
    parser.add_argument("--out", type=Path, default=Path("out/federated"), help="for clients' ledgers and checkpoints")
    args = parser.parse_args()
    args.out = args.out.resolve()  # clients run in other folders
    logging.getLogger("flwr").setLevel(logging.ERROR)

    # Flower announces that this function will go, for the command `flwr run`, which wants a project of its own.
    run_simulation(
        server_app=server_app(args),
        client_app=client_app(args),
        num_supernodes=args.clients,
        backend_config={"client_resources": {"num_cpus": 1}, "init_args": {"log_to_driver": False}},
    )

    epsilons = []
    for client in range(args.clients):
        ledger = dpq.Ledger.read(args.out / f"client-{client}" / "ledger.json")
        training, analysis = (sum(e.steps for e in ledger.entries if e.purpose == p) for p in ("training", "analysis"))
        epsilons.append(ledger.epsilon(DELTA))
        records = len(records_of(client, args.clients))
        print(f"client {client}: {records} records, {training} steps, {analysis} analyses, epsilon {epsilons[-1]:.6f}")
    print(f"Each record is with one client, so all of it has epsilon {max(epsilons):.6f} at delta {DELTA:g}.")


if __name__ == "__main__":
    main()
