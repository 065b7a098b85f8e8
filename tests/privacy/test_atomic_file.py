"""`write_whole`: the old file or the new one, and never a part of either."""

import os
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from dpquant_compile.privacy.atomic_file import write_whole


def test_a_file_is_made_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "state"
    for data in (b"first", b"second, and longer", b""):
        write_whole(path, lambda file, data=data: file.write(data))
        assert path.read_bytes() == data and os.listdir(tmp_path) == ["state"]


def test_a_failing_write_leaves_the_old_file_and_the_next_one_succeeds(tmp_path: Path) -> None:
    path, placed = tmp_path / "state", []
    write_whole(path, lambda file: file.write(b"old"))

    def half(file: BinaryIO) -> None:
        file.write(b"ne")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_whole(path, half, lambda: placed.append(True))
    assert path.read_bytes() == b"old" and not placed
    write_whole(path, lambda file: file.write(b"new"), lambda: placed.append(True))
    assert path.read_bytes() == b"new" and placed and os.listdir(tmp_path) == ["state"]


@pytest.mark.parametrize(("fault", "left"), [("fsync", b"old"), ("replace", b"old"), ("open", b"new")])
def test_placed_is_called_once_the_new_file_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, left: bytes
) -> None:
    path, seen = tmp_path / "state", []
    write_whole(path, lambda file: file.write(b"old"))

    def fail(*_: Any) -> None:
        raise OSError("disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(os, fault, fail)
        with pytest.raises(OSError, match="disk is gone"):
            write_whole(path, lambda file: file.write(b"new"), lambda: seen.append(path.read_bytes()))
    assert path.read_bytes() == left and seen == [b"new"] * (left == b"new")
