"""Models of the tasks: small ones for a CPU, and the published ones with GroupNorm in place of BatchNorm."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpquant_compile import torchvision_compat
from dpquant_compile.batchnorm import replace_batch_norm
from dpquant_compile.errors import LabError

__all__ = ["DigitsNet", "PairClassifier", "ResNet18", "SmallNet", "bert", "from_torchvision"]


class Block(nn.Module):
    """Two 3×3 convolutions with GroupNorm and a skip connection."""

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(groups, channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(groups, channels)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(y)))


class DigitsNet(nn.Module):
    """Eight sites for images of 8×8: six convolutions and two linear layers."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, padding=1)
        self.block1 = Block(16, 4)
        self.down = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.block2 = Block(32, 4)
        self.fc1 = nn.Linear(32 * 4 * 4, 64)
        self.fc2 = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block1(F.relu(self.stem(x)))
        x = self.block2(F.relu(self.down(x)))
        logits: Tensor = self.fc2(F.relu(self.fc1(x.flatten(1))))
        return logits


class SmallNet(nn.Module):
    """Twelve sites for images of 32×32: a stem, three stages with two convolutions each, and a linear classifier."""

    def __init__(self, classes: int, widths: tuple[int, int, int] = (16, 32, 64), channels: int = 3) -> None:
        super().__init__()
        first, second, third = widths
        self.stem = nn.Conv2d(channels, first, 5, stride=2, padding=2)
        self.norm = nn.GroupNorm(2, first)
        self.down1 = nn.Conv2d(first, second, 3, stride=2, padding=1)
        self.block1 = Block(second, 4)
        self.block2 = Block(second, 4)
        self.down2 = nn.Conv2d(second, third, 3, stride=2, padding=1)
        self.block3 = Block(third, 8)
        self.block4 = Block(third, 8)
        self.fc = nn.Linear(third * 4, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        x = self.block2(self.block1(F.relu(self.down1(x))))
        x = self.block4(self.block3(F.relu(self.down2(x))))
        logits: Tensor = self.fc(F.adaptive_avg_pool2d(x, 2).flatten(1))
        return logits


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions with GroupNorm around a shortcut, which is a 1×1 convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(32, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(32, outputs)
        self.short: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.short = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.GroupNorm(32, outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.short(x))


class ResNet18(nn.Module):
    """ResNet18 with GroupNorm, in torchvision's shapes: 21 sites. Nothing is in place, which Opacus does not bear."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.norm = nn.GroupNorm(32, 64)
        widths = (64, 64, 128, 256, 512)
        self.stages = nn.Sequential()
        for i, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
            self.stages.append(ResidualBlock(inputs, outputs, stride=2 if i else 1))
            self.stages.append(ResidualBlock(outputs, outputs, stride=1))
        self.fc = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.stem(x))), 3, stride=2, padding=1)
        logits: Tensor = self.fc(F.adaptive_avg_pool2d(self.stages(x), 1).flatten(1))
        return logits


def from_torchvision(name: str, classes: int, *, pretrained: bool, folder: Path | None = None) -> nn.Module:
    """A torchvision model with a new classifier and GroupNorm; pretrained weights if requested.

    They come from a file NAME_….pth in `folder` if there is one; else they are ImageNet's, from the network or from
    torch's cache folder.
    """
    models = torchvision_compat.models()
    local = sorted(folder.glob(f"{name}_*.pth")) if pretrained and folder is not None else []
    if local:
        net = _from_file(models, name, local[0])
    else:
        try:
            net = models.get_model(name, weights="IMAGENET1K_V1" if pretrained else None)
        except OSError as error:  # urllib's errors are OSErrors
            raise LabError(
                f"the ImageNet weights of {name} are not available: {error}. Fix: connect to the network once, put the "
                "file into the folder that torch.hub.get_dir() names, under checkpoints/, or give --data FOLDER with "
                f"weights in a file {name}_….pth"
            ) from error
    if hasattr(net, "fc"):
        net.fc = nn.Linear(net.fc.in_features, classes)
    else:
        net.classifier = nn.Linear(net.classifier.in_features, classes)
    return replace_batch_norm(net)


def _from_file(models: Any, name: str, path: Path) -> Any:
    """A network with the weights of a file, whatever its number of classes.

    "stem1" in the file's name says that the first convolution had no stride.
    """
    try:
        state = torch.load(path, weights_only=True, map_location="cpu")
        heads = [value for value in state.values() if value.dim() == 2]
        net = models.get_model(name, num_classes=heads[-1].shape[0])
        net.load_state_dict(state)  # casts to the model's dtype
        if "stem1" in path.name:
            net.conv1.stride = (1, 1)
    except Exception as error:  # a file may hold anything
        raise LabError(f"{path} does not hold the weights of {name}: {error}. Fix: another file, or none") from error
    return net


class PairClassifier(nn.Module):
    """A BERT-type encoder and a linear classifier on its first token.

    Takes one tensor [B, 3, L]: token ids, token types and mask, so that a sample is one row of one tensor.
    """

    def __init__(self, encoder: nn.Module, width: int, classes: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.classifier = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        ids, types, mask = x.unbind(1)
        states: Tensor = self.encoder(input_ids=ids, token_type_ids=types, attention_mask=mask, return_dict=False)[0]
        logits: Tensor = self.classifier(states[:, 0])
        return logits


def bert(source: str | Path, classes: int, *, trained_layers: int) -> PairClassifier:
    """A pretrained BERT from the hub or from a local folder, frozen except for its last `trained_layers` layers."""
    torchvision_compat.models()  # before transformers, which imports torchvision if it is installed
    auto = _transformers("AutoModel")
    try:
        encoder: Any = auto.from_pretrained(str(source), add_pooling_layer=False, attn_implementation="eager")
    except OSError as error:
        raise LabError(
            f"there is no pretrained model at {source}: {error}. Fix: connect to the network, or give the folder of a "
            "local copy"
        ) from error
    encoder.requires_grad_(False)
    for layer in encoder.encoder.layer[len(encoder.encoder.layer) - trained_layers :]:
        layer.requires_grad_(True)
    for module in encoder.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return PairClassifier(encoder, encoder.config.hidden_size, classes)


def _transformers(name: str) -> Any:
    try:
        import transformers
    except ImportError as error:
        raise LabError("this task needs the package transformers: pip install transformers") from error
    return getattr(transformers, name)


def tokenizer(source: str | Path) -> Callable[..., Any]:
    """The tokenizer of a pretrained model."""
    auto = _transformers("AutoTokenizer")
    made: Callable[..., Any] = auto.from_pretrained(str(source))
    return made


def parameters(model: nn.Module) -> int:
    """The number of trainable parameters of a model."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def seeded(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """A model whose initial weights depend on `seed`; torch's own generator is left unchanged."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()
