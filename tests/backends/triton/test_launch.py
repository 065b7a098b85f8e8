"""Where the Triton kernels run, and the reasons where they do not."""

import sys
from collections.abc import Iterator

import pytest
import torch

from dpquant_compile.backends.ops.site import axis_list, site_call
from dpquant_compile.backends.registry import SiteCall, choose_kernel
from dpquant_compile.backends.triton import launch
from dpquant_compile.errors import KernelError
from dpquant_compile.sites import BatchAxis

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture(autouse=True)
def _chosen_anew() -> Iterator[None]:
    for cached in (choose_kernel, launch._missing, launch.load):
        cached.cache_clear()
    yield
    for cached in (choose_kernel, launch._missing, launch.load):
        cached.cache_clear()


def call(backend: str) -> SiteCall:
    return site_call("linear", 0, 0, f"int4/none/{backend}", axis_list(BatchAxis(0), BatchAxis(0)))


def with_capability(monkeypatch: pytest.MonkeyPatch, *capability: int) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_a_gpu_with_int8_products_takes_it(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    with_capability(monkeypatch, *capability)
    choice = choose_kernel(call("auto"), CUDA)
    assert str(choice) == "triton (native)" and "never run on hardware" in choice.kernel.note


def test_without_triton_a_gpu_falls_back_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with_capability(monkeypatch, 9, 0)
    monkeypatch.setitem(sys.modules, "triton", None)  # which makes `import triton` fail
    choice = choose_kernel(call("auto"), CUDA)
    assert str(choice) == "reference (emulated)"
    assert "`pip install triton`" in dict(choice.passed_over)["triton"]
    with pytest.raises(KernelError, match=r"needs the package triton.*Try backend='auto'"):
        choose_kernel(call("triton"), CUDA)
    with pytest.raises(KernelError, match="pip install triton"):
        launch.load()


def test_turing_falls_back_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with_capability(monkeypatch, 7, 5)
    choice = choose_kernel(call("auto"), CUDA)
    assert str(choice) == "reference (emulated)"
    said = dict(choice.passed_over)["triton"]
    assert said == "compute capability 7.5: Triton multiplies int8 by tensor cores from 8.0 on"


def test_other_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch.unavailable(torch.device("meta")) == "for NVIDIA GPUs, not for meta"
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert launch.unavailable(CUDA) == "for NVIDIA GPUs, not for AMD's"


def test_the_cpu_is_for_the_interpreter_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch.interpreted() and launch.unavailable(CPU) is None
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert launch.unavailable(CPU) == "for NVIDIA GPUs, not for cpu"
    with pytest.raises(KernelError, match="for NVIDIA GPUs, not for cpu"):
        choose_kernel(call("triton"), CPU)
