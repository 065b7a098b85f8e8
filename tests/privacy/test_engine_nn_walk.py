"""Every class of torch.nn and every function of torch.nn.functional trains privately, or is refused with a way out."""

import pytest
import torch
from opacus.layers import DPGRU, DPLSTM, DPRNN
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpquant_compile as dpq
from dpquant_compile.errors import DPQuantError
from tests.support import nn_walk
from tests.support.heavy import few
from tests.support.nn_training import check_training, model_of
from tests.support.nn_walk import CASES, NO_CASE, PAGE, Called, Case, called, groups, public_names
from tests.support.private import made_private

REFUSED = [case for case in CASES if case.refused]
# Functions alone are the operators of modules, and so of other groups.
LAYERS = (cases for cases in groups() if any(case.name.startswith("nn.") for case in cases))
GROUPS = few(groups(), *(cases[0].name for cases in LAYERS), name=lambda cases: cases[0].name)
CRITERIA = [case for case in CASES if case.loss is not None]


def test_every_public_name_has_a_case_or_a_reason() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    known = {case.public for case in CASES}
    assert public_names() - known - NO_CASE.keys() == set(), "write a case in tests/support/nn_walk.py"
    assert (known | NO_CASE.keys()) - public_names() == set(), "torch has these no longer"
    assert not known & NO_CASE.keys()


def test_the_parts_of_a_transformer_are_in_its_case() -> None:
    (case,) = (case for case in CASES if case.name == "nn.Transformer")
    parts = {f"nn.{type(module).__name__}" for module in case.build().modules()}
    assert {name for name, why in NO_CASE.items() if "inside" in why} <= parts


def test_the_support_page_has_the_table() -> None:
    text = PAGE.read_text()
    assert nn_walk.written(text) == text, "run: python -m tests.support.nn_walk"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("cases", GROUPS, ids=lambda cases: f"{cases[0].name} to {cases[-1].name}")
def test_what_trains_has_the_clipped_gradients_of_a_loop(cases: list[Case]) -> None:
    try:
        check_training(cases)
    except Exception:
        for case in cases:  # alone, so that the one at fault is named
            try:
                check_training([case])
            except Exception as error:
                raise AssertionError(f"{case.name}: {error}") from error
        raise


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("case", CRITERIA, ids=lambda case: case.name)
def test_criteria_have_the_clipped_gradients_of_a_loop(case: Case) -> None:
    check_training([case])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name)
def test_what_is_refused_names_the_alternative(case: Case) -> None:
    model, x = model_of([case])
    with pytest.raises(DPQuantError) as caught:
        made_private(model, len(x), inner="eager")[0](x)
    assert case.refused in str(caught.value)
    assert case.instead


@pytest.mark.slow
@pytest.mark.parametrize("layer", [DPLSTM, DPGRU, DPRNN])
def test_recurrent_layers_of_opacus_train(layer: type[nn.Module]) -> None:
    check_training([Case("opacus", called(lambda: layer(4, 3, 1, batch_first=True), lambda m, x: m(x)[0]))])


@pytest.mark.slow
def test_a_capture_that_renames_sites_may_come_within_a_logical_batch() -> None:
    layer = DPLSTM(4, 3, batch_first=True)  # whose cells have another name in Dynamo's graph
    model = dpq.compile(Called(layer, lambda m, x: m(x)[0][:, -1]), budget=1, inner="eager").train()
    declared = model.sites.names
    model, optimizer, criterion, loader = dpq.PrivacyEngine(accountant="rdp").make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(TensorDataset(torch.randn(8, 2, 4), torch.zeros(8, dtype=torch.int64)), batch_size=8),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        max_physical_batch_size=4,
    )
    for x, y in loader:  # every record, in two micro-batches of four
        criterion(model(x), y).backward()
        optimizer.step()
    assert model.sites.names != declared


def test_a_layer_that_is_refused_is_named_before_the_first_batch() -> None:
    engine, model = dpq.PrivacyEngine(accountant="rdp"), nn.Sequential(nn.LSTM(4, 3))
    assert not engine.is_compatible(module=model)
    with pytest.raises(DPQuantError, match=r"layer '0' \(LSTM\).*opacus\.layers\.DPLSTM"):
        made_private(model, 2, inner="eager")
    assert torch.is_grad_enabled()
