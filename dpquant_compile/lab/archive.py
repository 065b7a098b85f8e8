"""Read `.npz` archives of small images, compressed without loss: predicted from their neighbours, then deflated.

Such a file holds `data` (deflated planes, end to end), `sizes` (of each), `shape` [N, H, W, C], `chunk` (images per
plane) and `y` (labels). Colours are stored as G, R − G + 128, B − G + 128. Each is the difference, modulo 256, from a
prediction: the median of (left, above, left + above − corner), where corner is the pixel above left.
"""

import zlib
from pathlib import Path

import numpy as np

from dpquant_compile.errors import LabError

__all__ = ["read_archive", "read_tracks"]


def read_archive(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """uint8 images [N, H, W, C] and labels [N]; LabError if the file is no such archive."""
    try:
        with np.load(path) as file:
            packed, sizes, labels = file["data"].tobytes(), file["sizes"], file["y"]
            count, height, width, channels = (int(v) for v in file["shape"])
            chunk = int(file["chunk"])
        ends = np.cumsum(sizes)
        planes = iter(zlib.decompress(packed[end - size : end]) for size, end in zip(sizes, ends, strict=True))
        parts = []
        for start in range(0, count, chunk):
            n = min(chunk, count - start)
            stored = [np.frombuffer(next(planes), np.uint8).reshape(n, height, width) for _ in range(channels)]
            parts.append(_colours(_undo_prediction(np.stack(stored))))
    except (OSError, KeyError, ValueError, StopIteration, zlib.error) as error:
        raise LabError(f"{path} is no archive of images that can be read: {error}") from error
    return np.concatenate(parts), labels


def read_tracks(path: Path) -> np.ndarray:
    """The key `track` [N] of an archive: images of one class and track are frames of one object."""
    try:
        with np.load(path) as file:
            return np.asarray(file["track"])
    except (OSError, KeyError, ValueError) as error:
        raise LabError(f"{path} does not say which images are frames of one track: {error}") from error


def _undo_prediction(stored: np.ndarray) -> np.ndarray:
    """Pixels [C, N, H, W] from differences. Each pixel depends on earlier ones; all images are decoded together."""
    # Pixel dimensions first, so that each step reads and writes contiguous memory.
    image = np.ascontiguousarray(stored.transpose(2, 3, 0, 1)).astype(np.int16)
    for row in range(image.shape[0]):
        for column in range(image.shape[1]):
            left = image[row, column - 1] if column else None
            above = image[row - 1, column] if row else None
            if left is not None and above is not None:
                corner = image[row - 1, column - 1]
                low, high = np.minimum(left, above), np.maximum(left, above)
                guess = np.clip(left + above - corner, low, high)  # the median of the three
            elif left is not None or above is not None:
                guess = left if left is not None else above
            else:
                continue
            image[row, column] = (image[row, column] + guess) & 255
    return image.transpose(2, 3, 0, 1).astype(np.uint8)


def _colours(planes: np.ndarray) -> np.ndarray:
    """[N, H, W, C] from planes [C, N, H, W]; three planes are green and two differences from it."""
    if len(planes) != 3:
        return planes.transpose(1, 2, 3, 0)
    green, red, blue = planes
    shift = np.uint8(128)
    return np.stack([red + green - shift, green, blue + green - shift], axis=-1)
