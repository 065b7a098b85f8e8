"""Families of torchvision and timm train privately as the table of docs/support.md says."""

import pytest

from dpquant_compile import torchvision_compat

torchvision_compat.models()  # before timm, which imports torchvision
pytest.importorskip("timm")

from tests.support.heavy import few  # noqa: E402
from tests.support.vision_models import VISION_MODELS, VisionModel, committed_rows, examine  # noqa: E402

KEPT = ("torchvision vgg11", "torchvision mobilenet_v3_small", "torchvision vit_b_16")
SHOWN = few(VISION_MODELS, *KEPT, name=lambda model: model.name)
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("model", SHOWN, ids=lambda model: model.name)
@pytest.mark.filterwarnings("ignore")  # of torchvision and timm, on tiny configurations
def test_a_family_trains_as_the_table_says(model: VisionModel) -> None:
    """After a change: python -m tests.support.vision_models --write"""
    assert examine(model) == committed_rows()[model.name]


def test_the_table_has_a_row_for_each_model_and_no_other() -> None:
    assert list(committed_rows()) == [model.name for model in VISION_MODELS]
