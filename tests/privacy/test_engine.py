"""`PrivacyEngine`: what it hands out, what it accounts, and what it refuses."""

from typing import Any

import opacus
import pytest
import torch
import torch.nn.functional as F
from opacus.accountants import create_accountant
from opacus.data_loader import DPDataLoader
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpquant_compile as dpq
from dpquant_compile.errors import IsolationError, PrivacySpecError, PrivateTrainingError
from dpquant_compile.privacy.data.criterion import PrivateCriterion
from dpquant_compile.privacy.mechanism.optimizer import PrivateOptimizer
from tests.support import models
from tests.support.private_loops import FEATURES, Net, Run, compiled_net, made, plain_loader, train


def refused(**options: Any) -> None:
    """`make_private` with one thing changed."""
    model = options.pop("module", None)
    model = compiled_net() if model is None else model
    given = dict(module=model, data_loader=plain_loader(), noise_multiplier=1.0, max_grad_norm=1.0)
    if "optimizer" not in options:
        options["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
    dpq.PrivacyEngine(accountant="rdp").make_private(**(given | options))


# What it hands out


def test_loop_of_the_contract_and_its_types() -> None:
    run = made()
    assert isinstance(run.engine, opacus.PrivacyEngine)
    assert isinstance(run.optimizer, DPOptimizer) and isinstance(run.optimizer, PrivateOptimizer)
    assert isinstance(run.loader, DPDataLoader) and isinstance(run.criterion, PrivateCriterion)
    assert isinstance(run.model, dpq.CompiledModule)
    before = models.state(run.model)
    train(run, epochs=2)
    assert run.engine.accountant.history == [(1.0, 0.25, 8)]
    assert all(not torch.equal(value, before[name]) for name, value in run.model.named_parameters())


def test_without_a_criterion_there_are_three() -> None:
    compiled = compiled_net()
    model, optimizer, loader = dpq.PrivacyEngine(accountant="rdp").make_private(
        module=compiled,
        optimizer=torch.optim.SGD(compiled.parameters(), lr=0.1),
        data_loader=plain_loader(),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
    )
    assert model is compiled and not isinstance(loader, DPDataLoader)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def test_model_that_is_not_compiled_is_compiled_without_low_precision() -> None:
    plain = models.seeded(Net)
    model, _, _ = dpq.PrivacyEngine(accountant="rdp").make_private(
        module=plain,
        optimizer=torch.optim.SGD(plain.parameters(), lr=0.1),
        data_loader=plain_loader(),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    assert isinstance(model, dpq.CompiledModule) and not model.policy
    assert list(model.state_dict()) == list(plain.state_dict())


@pytest.mark.parametrize("mechanism", ["rdp", "gdp", "prv"])
@pytest.mark.filterwarnings("ignore:Optimal order is the")  # Opacus, of the RDP accountant at few steps
@pytest.mark.filterwarnings("ignore:GDP accounting is experimental")
def test_epsilon_is_that_of_the_accountant_run_by_hand(mechanism: str) -> None:
    run = made(engine=dpq.PrivacyEngine(accountant=mechanism), noise_multiplier=1.3, max_physical_batch_size=2)
    train(run, epochs=3)
    by_hand = create_accountant(mechanism=mechanism)
    for _ in range(3 * run.loader.steps):
        by_hand.step(noise_multiplier=1.3, sample_rate=6 / 24)
    assert run.engine.get_epsilon(1e-5) == pytest.approx(by_hand.get_epsilon(1e-5), rel=1e-9)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Optimal order is the")
@pytest.mark.parametrize("target", [1.0, 8.0])
def test_target_epsilon_is_met(target: float) -> None:
    engine, compiled = dpq.PrivacyEngine(accountant="rdp"), compiled_net()
    private = engine.make_private_with_epsilon(
        module=compiled,
        optimizer=torch.optim.SGD(compiled.parameters(), lr=0.1),
        criterion=nn.CrossEntropyLoss(),
        data_loader=plain_loader(),
        target_epsilon=target,
        target_delta=1e-5,
        epochs=3,
        max_grad_norm=1.0,
        max_physical_batch_size=4,
    )
    train(Run(*private, engine), epochs=3)
    assert 0.97 * target < engine.get_epsilon(1e-5) <= target * 1.001
    with pytest.warns(UserWarning, match="has spent privacy already"):
        engine.make_private_with_epsilon(
            module=compiled,
            optimizer=torch.optim.SGD(compiled.parameters(), lr=0.1),
            data_loader=plain_loader(private[-1].dataset),
            target_epsilon=target,
            target_delta=1e-5,
            epochs=3,
            max_grad_norm=1.0,
        )


def test_another_dataset_is_warned_of() -> None:
    run = made()
    with pytest.warns(UserWarning, match="another dataset"):
        made(engine=run.engine)


def test_schedulers_of_torch_and_opacus_work() -> None:
    run = made()
    rate = torch.optim.lr_scheduler.StepLR(run.optimizer, 1, 0.5)
    noise = opacus.schedulers.ExponentialNoise(run.optimizer, gamma=0.5)
    clip = opacus.schedulers.ExponentialGradClip(run.optimizer, gamma=0.5)
    train(run)
    rate.step()
    noise.step()
    clip.step()
    assert run.optimizer.param_groups[0]["lr"] == 0.05 and run.optimizer.max_grad_norm == 0.5
    train(run)
    assert run.engine.accountant.history == [(1.0, 0.25, 4), (0.5, 0.25, 4)]
    assert run.engine.session is not None and run.engine.session.sensitivity == 0.5


def test_closure_and_no_zero_grad_at_all() -> None:
    run, other = made(), made()
    for x, y in run.loader:

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            run.optimizer.zero_grad()
            loss: Tensor = run.criterion(run.model(x), y)
            loss.backward()
            return loss

        run.optimizer.step(closure)
    for x, y in other.loader:
        other.criterion(other.model(x), y).backward()
        other.optimizer.step()
    for a, b in zip(run.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(a, b)


# What make_private refuses


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(noise_multiplier=-1.0), "noise_multiplier=-1.0: give a finite number"),
        (dict(noise_multiplier=float("nan")), "noise_multiplier=nan: give a finite number"),
        (dict(noise_multiplier="1"), "noise_multiplier='1'"),
        (dict(max_grad_norm=0.0), "max_grad_norm=0.0: bounds must be finite and greater than zero"),
        (dict(max_grad_norm=float("inf")), "max_grad_norm=inf"),
        (dict(max_grad_norm=None), "max_grad_norm=None"),
        (dict(max_grad_norm=[1.0, 2.0]), "2 bounds, but clipping='flat' has one.*clipping='per_layer'"),
        (dict(max_grad_norm=[1.0, 2.0], clipping="per_layer"), "2 bounds for 6 trainable parameters: give one each"),
        (dict(clipping="ghost"), "clipping='ghost': choose one of flat, per_layer, automatic"),
        (dict(loss_reduction="none"), "loss_reduction='none': choose 'mean' or 'sum'"),
        (dict(max_physical_batch_size=0), "max_physical_batch_size=0: give an int from 1 up"),
        (dict(batch_first=False), "batch_first=False"),
        (dict(grad_sample_mode="hooks"), r"grad_sample_mode='hooks'.*leave it out"),
        (dict(noize=1.0), "got noize=1.0, which it does not know"),
        (
            dict(criterion=nn.CrossEntropyLoss(reduction="sum"), loss_reduction="mean"),
            "loss_reduction='mean', but the criterion has reduction='sum': leave loss_reduction out",
        ),
        (dict(criterion=nn.CrossEntropyLoss(), loss_reduction="sum"), "has reduction='mean': leave loss_reduction out"),
        (dict(criterion=lambda x, y: (x - y).square().mean()), "no reduction that can be set to 'none'"),
    ],
)
def test_bad_arguments_are_told_and_leave_the_model_free(options: dict[str, Any], message: str) -> None:
    model = compiled_net()
    with pytest.raises(PrivacySpecError, match=message):
        refused(module=model, **options)
    model(torch.randn(3, FEATURES)).sum().backward()  # still trains as it did
    assert model.fc.weight.grad is not None


def test_wrong_optimizers_are_refused() -> None:
    with pytest.raises(PrivacySpecError, match=r"not the model's: make it of model\.parameters\(\)"):
        refused(optimizer=torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    frozen = compiled_net(models.seeded(Net).requires_grad_(False))
    with pytest.raises(PrivacySpecError, match="nothing to train"):
        refused(module=frozen)


def test_an_optimizer_that_needs_a_closure_is_refused_before_it_spends() -> None:
    with pytest.raises(PrivacySpecError, match=r"LBFGS computes the loss several times.*Fix: .*SGD, Adam"):
        made(optimizer=lambda parameters: torch.optim.LBFGS(parameters))


def test_wrong_models_are_refused() -> None:
    with pytest.raises(PrivacySpecError, match=r"compiled by torch\.compile.*dpquant_compile\.compile\(model"):
        refused(module=torch.compile(models.seeded(Net)))
    compiled = compiled_net()
    with pytest.raises(PrivacySpecError, match=r"leave torch\.compile out"):
        refused(module=torch.compile(compiled))
    several = nn.DataParallel(compiled)
    several.device_ids = [0, 1]
    with pytest.raises(PrivacySpecError, match=r"over 2 devices.*model\.module"):
        refused(module=several)


def test_data_parallel_without_devices_is_taken_off() -> None:
    model = nn.DataParallel(compiled_net())
    private, *_ = dpq.PrivacyEngine(accountant="rdp").make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=plain_loader(),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    assert private is model.module


def test_batch_norm_is_refused_at_once_or_at_the_first_forward() -> None:
    engine = dpq.PrivacyEngine(accountant="rdp")
    model = compiled_net(models.seeded(models.BatchNormNet))
    with pytest.raises(IsolationError, match=r"layer 'bn1' \(BatchNorm2d\).*replace_batch_norm\(model\)"):
        refused(module=model)
    assert not engine.is_compatible(module=model) and engine.is_compatible(module=compiled_net())
    model.eval()  # then it keeps samples apart, until somebody calls train()
    images = TensorDataset(torch.randn(8, 3, 8, 8), torch.randint(0, 2, (8,)))
    model, _, _ = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(images, batch_size=4),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    model.train()
    with pytest.raises(IsolationError, match=r"BatchNorm in training mode.*"):
        model(torch.randn(4, 3, 8, 8))
    dpq.replace_batch_norm(model)
    refused(module=model)


def test_noise_generator_and_secure_mode_rule_each_other_out() -> None:
    with pytest.raises(PrivacySpecError, match="noise_generator= makes the noise repeatable"):
        made(engine=dpq.PrivacyEngine(accountant="rdp", secure_mode=True), noise_generator=torch.Generator())


def test_state_before_make_private_is_refused() -> None:
    with pytest.raises(PrivacySpecError, match="call make_private first"):
        dpq.PrivacyEngine(accountant="rdp").state_dict()


# Variants, which private training does not run


def test_precompiling_a_private_model_is_refused() -> None:
    run = made(compile_options={"inner": "eager"})
    with pytest.raises(PrivateTrainingError, match=r"one program serves all policies.*Fix: leave precompile\(\) out"):
        run.model.precompile(["all"])
    train(run)  # it trains on


@pytest.mark.slow
def test_model_with_variants_is_refused_until_they_are_dropped() -> None:
    model = compiled_net(models.seeded(Net), inner="aot_eager")
    model(torch.randn(3, FEATURES)).sum().backward()
    waiting = model.precompile(["all"])
    with pytest.raises(PrivacySpecError, match=r"precompile\(\) was called.*drop them by model\.recapture\(\)"):
        refused(module=model)  # also while a thread still compiles them
    waiting.wait(120)
    with pytest.raises(PrivacySpecError, match=r"precompile\(\) was called"):
        refused(module=model)
    model(torch.randn(3, FEATURES)).sum().backward()  # still trains as it did
    model.recapture()
    refused(module=model)


@pytest.mark.slow
def test_variants_may_serve_the_quantized_evaluation_of_a_private_model() -> None:
    options = {"inner": "aot_eager", "quantize_eval": True, "backend": "reference"}
    run = made(models.seeded(Net), policy="all", compile_options=options)
    x = torch.randn(3, FEATURES)
    wanted = run.model.eval()(x).detach()
    run.model.precompile(["all"], background=False)
    assert len(run.model._variants) == 1
    assert torch.equal(run.model(x), wanted)
    run.model.train()
    train(run)
    refused(module=run.model)  # a second run of the same model


# Frozen and unused parameters


class Spare(Net):
    """A layer that forward does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(4, 4)


def test_frozen_unused_and_foreign_parameters_stay() -> None:
    model = models.seeded(Spare)
    model.body.requires_grad_(False)
    run = made(model, optimizer=lambda _: torch.optim.SGD([*model.fc.parameters(), *model.spare.parameters()], lr=0.1))
    before = models.state(run.model)
    train(run)
    moved = {name for name, p in run.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {"fc.weight", "fc.bias"}  # neither frozen, nor unused, nor left out of the optimizer (norm)
    assert run.model.norm.weight.grad is None and run.model.spare.weight.grad is None


def test_freezing_and_unfreezing_between_epochs() -> None:
    run = made(policy="all")
    train(run)
    run.model.body.requires_grad_(False)
    before = models.state(run.model)
    train(run)
    assert torch.equal(run.model.body.weight, before["body.weight"])
    assert not torch.equal(run.model.fc.weight, before["fc.weight"])
    run.model.body.requires_grad_(True)
    train(run)
    assert not torch.equal(run.model.body.weight, before["body.weight"])


def test_parameter_that_was_frozen_for_make_private_cannot_be_trained_around_it() -> None:
    model = models.seeded(Net)
    model.body.requires_grad_(False)
    run = made(model, noise_multiplier=0.0)
    train(run)
    model.body.requires_grad_(True)
    before = model.body.weight.detach().clone()
    x, y = next(iter(run.loader))
    run.optimizer.zero_grad()
    (run.criterion(run.model(x), y) + (x @ model.body.weight.T).sum()).backward()
    with pytest.raises(PrivateTrainingError, match=r"was frozen.*Fix: call make_private again"):
        run.optimizer.step()
    assert torch.equal(model.body.weight, before)


def test_steps_that_no_sampling_drew_are_charged_in_full() -> None:
    run = made()
    run.criterion(run.model(torch.randn(4, FEATURES)), torch.zeros(4, dtype=torch.int64)).backward()
    run.optimizer.step()
    assert [(e.q, e.steps) for e in run.engine.ledger.entries] == [(1.0, 1)]
    run = made(poisson_sampling=False)
    train(run)
    assert [(e.q, e.steps) for e in run.engine.ledger.entries] == [(1.0, 4)]
    assert "not Poisson samples" in run.engine.ledger.statement(1e-5)


def test_the_step_is_the_same_in_eval() -> None:
    run = made()
    run.criterion(run.model(torch.randn(4, FEATURES)), torch.zeros(4, dtype=torch.int64)).backward()
    run.optimizer.step()
    step = run.model.step
    run.model.eval()
    assert run.model.step == step == 1
