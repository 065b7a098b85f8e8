"""C++ sources as a library: built once, called with tensors and numbers, and not left waiting in a forked child."""

import os
import select
import signal
from pathlib import Path

import pytest
import torch

from dpquant_compile.backends import native_library
from dpquant_compile.backends.cpu_int8 import build as native
from dpquant_compile.backends.native_library import NativeLibrary, numbers

pytestmark = pytest.mark.skipif(isinstance(native._built(), str), reason="no C++ compiler")

SOURCE = """
#include <omp.h>
#include <cstdint>
extern "C" {
const char* dpq_word() { return "word"; }
int dpq_seven() { return 7; }
void dpq_sum(const float* x, const uint8_t* bytes, const int64_t* many, int64_t n, float by, float* out, int threads) {
  float total = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : total)
  for (int64_t i = 0; i < n; i++) total += x[i] * by;
  out[0] = total + bytes[1] + many[1];
  out[1] = threads;
}
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> NativeLibrary:
    folder = tmp_path_factory.mktemp("cpp")
    (folder / "sum.cpp").write_text(SOURCE)
    path = native_library.build(folder, what="test")
    assert path == native_library.build(folder, what="test")
    return NativeLibrary(path)


def total(library: NativeLibrary) -> list[float]:
    out = torch.zeros(2)
    library("sum", torch.ones(1000), bytes([0, 3]), numbers(0, 20), 1000, 0.5, out)
    result: list[float] = out.tolist()
    return result


def test_arguments_arrive(library: NativeLibrary) -> None:
    assert library.text("word") == "word" and library.number("seven") == 7
    assert total(library) == [523.0, float(torch.get_num_threads())]
    out = torch.zeros(2)
    library("sum", None, bytes(2), (0, 1), 0, 0.0, out)
    assert out[0] == 1.0


def test_sources_that_do_not_compile_say_so(tmp_path: Path) -> None:
    (tmp_path / "bad.cpp").write_text("int f() { return nothing; }")
    with pytest.raises(RuntimeError, match="nothing"):
        native_library.build(tmp_path, what="test")


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_does_not_wait_for_threads_that_it_has_not(library: NativeLibrary) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert total(library) == [523.0, 2.0]
        out, into = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.write(into, repr(total(library)).encode())
            finally:
                os._exit(0)
        os.close(into)
        answered, _, _ = select.select([out], [], [], 30)
        told = os.read(out, 100) if answered else b"nothing"
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(out)
        assert told == b"[523.0, 1.0]"
        assert total(library) == [523.0, 2.0]
    finally:
        torch.set_num_threads(before)
