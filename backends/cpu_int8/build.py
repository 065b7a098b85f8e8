"""The C++ kernels: built once per machine by the C++ compiler that Inductor uses, and called through ctypes.

The library has no dependency but OpenMP, so building it takes seconds and no headers of torch. It lies in Inductor's
cache folder under a name made of its sources, the compiler and the instructions of this CPU.
"""

import ctypes
import hashlib
import os
import platform
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.runtime.cache_dir_utils import cache_dir

from dpquant_compile.progress import progress

__all__ = ["Library", "Numbers", "instructions", "load", "numbers", "unavailable"]

_SOURCES = Path(__file__).parent / "cpp"
# No contraction of a·b + c: every path must round as the reference does.
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fopenmp",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-shared",
    "-fPIC",
)


class Library:
    """The functions of `cpp/`. Tensors are passed by address: dense, on the CPU, of the dtype the C++ says.

    name     which instructions the products use, "scalar" for none
    columns  how many columns a panel holds
    rows     how many rows are multiplied with it at once
    slack    bytes that must lie behind an array of codes, since rows are read in whole words
    """

    def __init__(self, path: Path) -> None:
        self._functions: Any = ctypes.CDLL(str(path))
        self._functions.dpq_name.restype = ctypes.c_char_p
        self.name: str = self._functions.dpq_name().decode()
        self.columns: int = self._functions.dpq_columns()
        self.rows: int = self._functions.dpq_rows()
        self.slack: int = self._functions.dpq_slack()

    def __call__(self, function: str, *arguments: "Tensor | int | Numbers | tuple[int, ...] | None") -> None:
        """Call a function with its arguments in order; the number of threads, which all take last, is torch's own."""
        given = [_address(value) for value in arguments]
        getattr(self._functions, f"dpq_{function}")(*given, ctypes.c_int(torch.get_num_threads()))


Numbers = ctypes.Array[ctypes.c_int64]


def numbers(*values: int) -> Numbers:
    """An array of int64 for calls that are made again and again: a tuple is converted each time."""
    return (ctypes.c_int64 * len(values))(*values)


def _address(value: "Tensor | int | Numbers | tuple[int, ...] | None") -> Any:
    """Tensors and arrays by address, numbers as int64 (an address may be given as one)."""
    if isinstance(value, Tensor):
        assert value.is_contiguous()
        return ctypes.c_void_p(value.data_ptr())
    if isinstance(value, ctypes.Array):
        return value
    if isinstance(value, tuple):
        return numbers(*value)
    return ctypes.c_int64(value or 0)


def unavailable() -> str | None:
    """Why there are no kernels for this machine; None if there are."""
    found = _built()
    if isinstance(found, str):
        return found
    return "this CPU has none of AVX512-VNNI, AVX-VNNI, AVX2, NEON dot product" if found.name == "scalar" else None


def load() -> Library:
    """The library for this machine. Requires: `unavailable()` is None."""
    found = _built()
    assert isinstance(found, Library)
    return found


@lru_cache(maxsize=1)
def _built() -> Library | str:
    try:
        return Library(build(("-march=native",)))
    except Exception as error:  # no compiler, no OpenMP, an odd platform: emulation still works
        return f"the C++ kernels could not be built: {str(error).strip().splitlines()[-1]}"


def build(target: tuple[str, ...]) -> Path:
    """Compile the sources for a target, such as `("-march=native",)`, unless that has been done; the library's path."""
    compiler = get_cpp_compiler()
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, text=True).stdout
    sources = sorted(_SOURCES.glob("*"))
    digest = hashlib.sha256()
    for part in (*_FLAGS, *target, version, platform.machine(), instructions()):
        digest.update(part.encode())
    for source in sources:
        digest.update(source.read_bytes())
    path = Path(cache_dir()) / "dpquant" / f"kernels-{digest.hexdigest()[:20]}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        # Under a name of its own until it is whole: other processes may look for it at the same time.
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            out = Path(folder) / path.name
            units = [str(source) for source in sources if source.suffix == ".cpp"]
            command = [compiler, *_FLAGS, *target, *units, "-o", str(out)]
            with progress("int8 kernels"):
                done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(done.stderr or f"{compiler} failed")
            os.replace(out, path)
    return path


def instructions() -> str:
    """What this CPU can do: a cache folder may be shared by several machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
