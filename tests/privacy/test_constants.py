"""What a private program reads beside the batch is fixed before any batch is seen, or refused at the first call."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpquant_compile as dpq
from dpquant_compile.errors import PrivacySpecError, PrivateTrainingError
from tests.support.private import clipped_sums, made_private


class Scaled(nn.Module):
    """Takes a number, a tensor without rows, or both, beside the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor, scale: Any = 1.0, shift: Tensor | None = None) -> Tensor:
        x = self.fc(x) * scale
        return x if shift is None else x + shift


class Open(nn.Module):
    """Takes its options as they come."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        return self.fc(x) * options.get("scale", 1.0)


class Stateful(nn.Module):
    """Reads a buffer, a plain tensor and a number of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)
        self.register_buffer("scale", torch.ones(3))
        self.shift = torch.zeros(3)
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * self.fc(x) * self.scale + self.shift


# Inputs


@pytest.mark.parametrize(
    ("name", "value"),
    [("scale", 0.5), ("scale", 2), ("scale", torch.tensor(0.5)), ("shift", torch.ones(3))],
    ids=["float", "int", "scalar tensor", "tensor"],
)
def test_an_input_without_rows_is_refused_at_its_first_call(name: str, value: Any) -> None:
    model, _, engine = made_private(Scaled(), 4)
    with pytest.raises(PrivateTrainingError, match=rf"'{name}'.*constant_inputs=\{{'{name}': value\}}"):
        model(torch.randn(4, 4), **{name: value})
    assert engine.session.step.empty and not engine.session._sums


def test_a_number_made_of_the_batch_is_refused() -> None:
    model, _, _ = made_private(Scaled(), 4)
    x = torch.randn(4, 4)
    with pytest.raises(PrivateTrainingError, match=r"'scale'.*made of the batch"):
        clipped_sums(model, [x, float(x.abs().max())])  # type: ignore[list-item]


def test_declared_constants_are_taken_and_must_stay() -> None:
    shift = torch.tensor([1.0, 2.0, 3.0])
    model, _, _ = made_private(Scaled(), 4, private={"constant_inputs": {"scale": 0.5, "shift": shift}})
    x = torch.randn(4, 4)
    out = model(x, 0.5, shift=shift.clone())
    torch.testing.assert_close(out, model.fc(x) * 0.5 + shift)
    with pytest.raises(PrivateTrainingError, match=r"'scale'.*another value"):
        model(x, 0.25, shift=shift)
    for left_out in ({"shift": shift}, {"scale": 1.0, "shift": shift}):  # at its default
        with pytest.raises(PrivateTrainingError, match=r"'scale' .*(left out|another value)"):
            model(x, **left_out)
    for without in ({"scale": 0.5}, {"scale": 0.5, "shift": None}):
        with pytest.raises(PrivateTrainingError, match=r"'shift' .* left out"):
            model(x, **without)
    with pytest.raises(PrivateTrainingError, match=r"'scale'.*another value"):
        model(x, True, shift=shift)
    shift.add_(1)  # what was declared was copied
    with pytest.raises(PrivateTrainingError, match=r"'shift'.*another value"):
        model(x, 0.5, shift=shift)


def test_defaults_and_rows_need_no_declaration() -> None:
    model, _, _ = made_private(Scaled(), 4)
    x = torch.randn(4, 4)
    model(x, 1.0, None)
    model, _, _ = made_private(Scaled(), 4)
    model(x, torch.rand(4, 1))


def test_keywords_of_an_open_signature_are_declared_by_name() -> None:
    model, _, _ = made_private(Open(), 4)
    with pytest.raises(PrivateTrainingError, match=r"'scale'.*constant_inputs"):
        model(torch.randn(4, 4), scale=3.0)
    model, _, _ = made_private(Open(), 4, private={"constant_inputs": {"scale": 3.0}})
    model(torch.randn(4, 4), scale=3.0)


def test_a_declaration_that_forward_does_not_take_is_refused() -> None:
    with pytest.raises(PrivacySpecError, match=r"'sclae'.*choose from x, scale, shift"):
        made_private(Scaled(), 4, private={"constant_inputs": {"sclae": 1.0}})


def test_an_analysis_refuses_numbers_made_of_its_batch() -> None:
    data = TensorDataset(torch.randn(16, 4), torch.randint(3, (16,)))
    scaled = dpq.compile(Scaled(), budget=0, backend="reference", example_inputs=(torch.randn(2, 4),)).train()
    engine = dpq.PrivacyEngine(accountant="rdp")
    engine.make_private(
        module=scaled,
        optimizer=torch.optim.SGD(scaled.parameters(), lr=0.1),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(data, batch_size=8),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    scheduler = dpq.Scheduler(
        engine,
        epochs=4,
        k=1,
        policies={"a": ["fc"], "b": ["fc"]},
        n_interval=1,
        n_sample=1,
        unpack=lambda batch: ((batch[0], float(batch[0].abs().max())), {}, batch[1]),
    )
    with pytest.raises(PrivateTrainingError, match=r"'scale'.*without a row per sample"):
        scheduler.step()


# State


@pytest.mark.parametrize("first", [True, False], ids=["before the first call", "later"])
@pytest.mark.parametrize("how", ["written", "replaced", "replaced through data", "written through data"])
def test_a_buffer_made_of_the_batch_is_refused(how: str, first: bool) -> None:
    model, _, _ = made_private(Stateful(), 4)
    x = torch.randn(4, 4)
    if not first:
        clipped_sums(model, [x])
    if how == "written":
        model.scale.copy_(x.abs().amax(0)[:3])
    elif how == "replaced":
        model.scale = x.abs().amax(0)[:3]
    elif how == "replaced through data":
        model.scale.data = x.abs().amax(0)[:3]
    else:
        model.scale.data.copy_(x.abs().amax(0)[:3])
    with pytest.raises(PrivateTrainingError, match=r"buffer 'scale'.*Fix"):
        clipped_sums(model, [x])


def test_a_buffer_that_is_written_with_what_it_holds_is_fine() -> None:
    model, _, _ = made_private(Stateful(), 4)
    x = torch.randn(4, 4)
    clipped_sums(model, [x])
    model.load_state_dict(model.state_dict())
    clipped_sums(model, [x])


@pytest.mark.parametrize("name", ["shift", "factor"])
def test_an_attribute_made_of_the_first_batch_is_refused(name: str) -> None:
    original = Stateful()
    model, _, _ = made_private(original, 4)
    x = torch.randn(4, 4)
    setattr(original, name, x.abs().amax(0)[:3] if name == "shift" else float(x.abs().max()))
    model.recapture()
    with pytest.raises(PrivateTrainingError, match=f"attribute '{name}'.*Fix"):
        clipped_sums(model, [x])


def write_through_data(tensor: Tensor, value: Tensor) -> None:
    tensor.data.copy_(value)


@pytest.mark.parametrize("first", [True, False], ids=["before the first call", "later"])
@pytest.mark.parametrize("kind", ["frozen parameter", "plain tensor", "tensor in a list"])
def test_other_tensors_made_of_the_batch_are_refused(kind: str, first: bool) -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)
            centre = torch.zeros(4)
            self.frozen = nn.Parameter(centre.clone(), requires_grad=False)
            self.plain, self.listed = centre.clone(), [centre.clone()]

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x - self.frozen - self.plain - self.listed[0])

    original = Centred()
    model, _, _ = made_private(original, 4)
    x = torch.randn(4, 4)
    if not first:
        clipped_sums(model, [x])
    written = {"frozen parameter": original.frozen, "plain tensor": original.plain}.get(kind, original.listed[0])
    write_through_data(written, x.mean(0))
    with pytest.raises(PrivateTrainingError, match=r"changed since make_private.*Fix"):
        clipped_sums(model, [x])


GLOBAL = torch.zeros(3)


def test_a_tensor_that_no_module_holds_stays_as_first_read() -> None:
    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) + GLOBAL

    model, _, _ = made_private(Reading(), 4)
    x = torch.randn(4, 4)
    clipped_sums(model, [x])
    GLOBAL.copy_(x.mean(0)[:3])
    try:
        with pytest.raises(PrivateTrainingError, match="changed since make_private"):
            clipped_sums(model, [x])
    finally:
        GLOBAL.zero_()


def test_a_graph_that_was_captured_with_a_number_of_the_batch_is_refused() -> None:
    original = Stateful()
    model, _, _ = made_private(original, 4)
    x = torch.randn(4, 4)
    original.factor = float(x.abs().max())
    with torch.no_grad():
        model(x)  # captures, and keeps the number
    original.factor = 1.0
    with pytest.raises(PrivateTrainingError, match="attribute 'factor'"):
        clipped_sums(model, [x])


def test_whether_an_argument_is_given_is_the_same_in_all_calls() -> None:
    model, _, _ = made_private(Scaled(), 4)
    x = torch.randn(4, 4)
    clipped_sums(model, [x, torch.ones(4, 1)])
    with pytest.raises(PrivateTrainingError, match=r"argument 'scale'.*in every call, or in none"):
        clipped_sums(model, [x])


def test_what_is_set_before_make_private_is_a_constant() -> None:
    original = Stateful()
    original.factor, original.shift = 2.0, torch.ones(3)
    original.scale.fill_(3.0)
    model, _, _ = made_private(original, 4)
    x = torch.randn(4, 4)
    torch.testing.assert_close(model(x), 6.0 * original.fc(x) + 1.0)
