"""Small members of the families of torchvision's and timm's models, which train privately as a loop over samples does.

`python -m tests.support.vision_models --write` writes their table in docs/support.md.
"""

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dpquant_compile as dpq
from dpquant_compile import torchvision_compat

vision: Any = torchvision_compat.models()  # before timm, which imports torchvision

import timm  # noqa: E402

from tests.support.nn_training import BATCH, check_against_loop  # noqa: E402

__all__ = ["VISION_MODELS", "VisionModel", "committed_rows", "examine"]

PAGE = Path(__file__).parents[2] / "docs" / "support.md"
MARKS = "<!-- vision -->", "<!-- end of vision -->"
TOLERANCE = 5e-5


@dataclass(frozen=True)
class VisionModel:
    """One model.

    name     library and the name there, as users write it
    build    makes it in a small size
    size     height and width of its images
    """

    name: str
    build: Callable[[], nn.Module]
    size: int = 32


def small(
    library: str,
    name: str,
    *args: Any,
    shown: str = "",
    size: int = 32,
    **kw: Any,
) -> VisionModel:
    """A function or class of torchvision.models or timm.models, on a small configuration; `shown` is its usual name."""

    def build() -> nn.Module:
        made: Any = {"torchvision": vision, "timm": timm.models}[library]
        for part in name.split("."):
            made = getattr(made, part)
        model: nn.Module = made(*args, num_classes=4, **kw)
        return model

    return VisionModel(f"{library} {shown or name}", build, size)


def vgg() -> nn.Module:
    """VGG11 with an eighth of the channels, and a small classifier: the original's has 120 million weights."""
    layers = [8, "M", 16, "M", 32, 32, "M", 64, 64, "M", 64, 64, "M"]
    with torch.device("meta"):
        model: nn.Module = vision.VGG(vision.vgg.make_layers(layers), num_classes=4, dropout=0.0)
    model.features = vision.vgg.make_layers(layers)
    model.classifier = nn.Sequential(nn.Linear(64 * 49, 16), nn.ReLU(True), nn.Linear(16, 4))
    return model


def mobile(expand: int, before: int, after: int) -> Any:
    """A stage of EfficientNet, with one block."""
    return vision.efficientnet.MBConvConfig(expand, 3, 2, before, after, 1)


def _torchvision() -> tuple[VisionModel, ...]:
    params = vision.regnet.BlockParams.from_init_params
    regnet = params(depth=4, w_0=16, w_a=16, w_m=2.0, group_width=8)
    convnext = [vision.convnext.CNBlockConfig(8, 16, 1), vision.convnext.CNBlockConfig(16, None, 1)]
    mobile_v3 = [
        vision.mobilenetv3.InvertedResidualConfig(16, 3, 16, 16, True, "RE", 2, 1, 1.0),
        vision.mobilenetv3.InvertedResidualConfig(16, 3, 32, 24, False, "HS", 2, 1, 1.0),
    ]
    efficient = [mobile(1, 8, 8), mobile(4, 8, 16)]
    return (
        small("torchvision", "ResNet", vision.resnet.BasicBlock, [1, 1, 1, 1], shown="resnet18"),
        VisionModel("torchvision vgg11", vgg),
        small(
            "torchvision",
            "DenseNet",
            growth_rate=8,
            block_config=(1, 1),
            num_init_features=16,
            shown="densenet121",
        ),
        small("torchvision", "squeezenet1_1", dropout=0.0, size=48),
        small("torchvision", "MobileNetV3", mobile_v3, 32, dropout=0.0, shown="mobilenet_v3_small"),
        small("torchvision", "EfficientNet", efficient, 0.0, stochastic_depth_prob=0.0, shown="efficientnet_b0"),
        small("torchvision", "RegNet", regnet, shown="regnet_x_400mf"),
        small("torchvision", "ConvNeXt", convnext, shown="convnext_tiny"),
        small("torchvision", "VisionTransformer", 32, 16, 1, 2, 16, 24, shown="vit_b_16"),
    )


def _timm() -> tuple[VisionModel, ...]:
    blocks = timm.models._efficientnet_builder.decode_arch_def
    mobile = blocks([["ds_r1_k3_s2_e1_c16_se0.25_nre"], ["ir_r1_k5_s2_e2_c24_se0.25"]])
    vit = {"img_size": 32, "embed_dim": 16, "depth": 1, "num_heads": 2}
    return (
        small("timm", "resnet10t", channels=(8, 16, 16, 16)),
        small(
            "timm",
            "mobilenetv3.MobileNetV3",
            mobile,
            num_features=32,
            act_layer=nn.Hardswish,
            shown="mobilenetv3_small_050",
        ),
        small(
            "timm", "mlp_mixer.MlpMixer", img_size=32, patch_size=8, num_blocks=1, embed_dim=16, shown="mixer_s32_224"
        ),
        small("timm", "vit_tiny_patch16_224", **vit),
        small("timm", "deit_tiny_distilled_patch16_224", **vit),
    )


VISION_MODELS = (*_torchvision(), *_timm())


def examine(model: VisionModel) -> str:
    """The row of a model in the table, after its clipped gradients were compared with a loop over samples.

    BatchNorm is replaced. Weights that begin as constants, many of them 0, are changed: gradients then reach every
    layer.
    """
    torch.manual_seed(0)
    original = dpq.replace_batch_norm(model.build(), groups=2).train()
    for parameter in original.parameters():
        if parameter.max() - parameter.min() < 1e-2:
            parameter.data += 0.3 * torch.randn(parameter.shape)
    layers = {n for n, m in original.named_modules() if isinstance(m, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)}
    images = torch.randn(BATCH, 3, model.size, model.size)
    compiled = check_against_loop(original, [images], tolerance=TOLERANCE)
    names = set(compiled.sites.names)
    return f"| {model.name} | {len(names)} of {len(layers | names)} | ✓ |"


def committed_rows() -> dict[str, str]:
    """The rows of the table in docs/support.md by model."""
    inside = PAGE.read_text().split(MARKS[0])[1].split(MARKS[1])[0]
    return {line.split("|")[1].strip(): line for line in inside.splitlines()[3:]}


def write_table() -> None:
    """Examine all models, and write what is found between the marks of docs/support.md."""
    head = ["| model | sites of linears and convs | clipped gradients equal a loop's |", "|---|---|---|"]
    rows = [examine(model) for model in VISION_MODELS]
    before, rest = PAGE.read_text().split(MARKS[0])
    PAGE.write_text("\n".join([before + MARKS[0], *head, *rows, MARKS[1]]) + rest.split(MARKS[1])[1])


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python -m tests.support.vision_models --write")
    warnings.simplefilter("ignore")
    write_table()
