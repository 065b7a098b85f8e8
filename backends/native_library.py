"""C++ sources as a library: built once per machine by the compiler that Inductor uses, and called through ctypes.

A library has no dependency but OpenMP, so building it takes seconds and no headers of torch. It lies in Inductor's
cache folder under a name made of its sources, the compiler and the instructions of this CPU.
"""

import ctypes
import hashlib
import os
import platform
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.runtime.cache_dir_utils import cache_dir

from dpquant_compile.progress import progress

__all__ = ["NativeLibrary", "Numbers", "build", "instructions", "numbers"]

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

Numbers = ctypes.Array[ctypes.c_int64]
Argument = Tensor | Numbers | tuple[int, ...] | bytes | int | float | None


class NativeLibrary:
    """The functions of a library, by their names without `dpq_`."""

    def __init__(self, path: Path) -> None:
        self._functions: Any = ctypes.CDLL(str(path))

    def __call__(self, function: str, *arguments: Argument) -> None:
        """Call a function with its arguments in order; the number of threads, which all take last, is torch's own.

        Tensors are passed by address: dense, on the CPU, of the dtype the C++ says. Bytes and arrays are too; an int is
        an int64, and a float a float32.
        """
        given = [_argument(value) for value in arguments]
        getattr(self._functions, f"dpq_{function}")(*given, ctypes.c_int(_THREADS.number()))

    def text(self, function: str) -> str:
        """The text that a function without arguments returns."""
        call = getattr(self._functions, f"dpq_{function}")
        call.restype = ctypes.c_char_p
        return str(call().decode())

    def number(self, function: str) -> int:
        """The number that a function without arguments returns."""
        return int(getattr(self._functions, f"dpq_{function}")())


class _Threads:
    """How many threads a call takes: as many as torch's operators.

    One in a child that was forked off a process with OpenMP's threads: the child has none of them, and OpenMP would
    wait for them forever.
    """

    def __init__(self) -> None:
        self._started = self._lost = False
        os.register_at_fork(after_in_child=self._after_fork)

    def number(self) -> int:
        number = 1 if self._lost else torch.get_num_threads()
        self._started |= number > 1
        return number

    def _after_fork(self) -> None:
        self._lost = self._started


_THREADS = _Threads()


def numbers(*values: int) -> Numbers:
    """An array of int64 for calls that are made again and again: a tuple is converted each time."""
    return (ctypes.c_int64 * len(values))(*values)


def _argument(value: Argument) -> Any:
    if isinstance(value, Tensor):
        assert value.is_contiguous()
        return ctypes.c_void_p(value.data_ptr())
    if value is None or isinstance(value, int):
        return ctypes.c_int64(value or 0)
    if isinstance(value, float):
        return ctypes.c_float(value)
    if isinstance(value, bytes):
        return ctypes.c_char_p(value)
    return numbers(*value) if isinstance(value, tuple) else value


def build(folder: Path, target: tuple[str, ...] = ("-march=native",), *, what: str) -> Path:
    """Compile the sources in a folder for a target, unless that has been done; the library's path.

    `what` it is, for the line that tells what is compiled.
    """
    compiler = get_cpp_compiler()
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, text=True).stdout
    sources = sorted(folder.glob("*"))
    digest = hashlib.sha256()
    for part in (*_FLAGS, *target, version, platform.machine(), instructions()):
        digest.update(part.encode())
    for source in sources:
        digest.update(source.read_bytes())
    path = Path(cache_dir()) / "dpquant" / f"kernels-{digest.hexdigest()[:20]}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        # Under a name of its own until it is whole: other processes may look for it at the same time.
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            out = Path(scratch) / path.name
            units = [str(source) for source in sources if source.suffix == ".cpp"]
            command = [compiler, *_FLAGS, *target, *units, "-o", str(out)]
            with progress(what):
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
