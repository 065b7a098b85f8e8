"""A device that is not the CPU, for machines without one: what a GPU would make wait is seen, and counted.

A `Far` tensor says that it lies on the device "pretend" and holds its numbers in a tensor of the CPU. `PretendDevice`
runs every operator on such tensors as a GPU would: results stay there, tensors of both places in one operator are an
error, and every way back to the host is noted with the lines that asked for it. Autograd, the tracing of programs and
the choice of kernels see a device as any other. It shows nothing of CUDA's own: streams, Triton, speed.

It registers a device with torch, once and for all, so it needs a process of its own: `notes_of` runs a function there.
"""

import json
import os
import subprocess
import sys
import traceback
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from dpquant_compile.backends import sending
from dpquant_compile.privacy import hooks
from dpquant_compile.privacy.mechanism import device_normals

ROOT = Path(__file__).resolve().parents[2]
NAME = "pretend"

# Operators that give the host a number, or whose results have a size that only the device knows.
READS = {
    "_local_scalar_dense",
    "_unique2",
    "equal",
    "is_nonzero",
    "masked_select",
    "nonzero",
    "repeat_interleave",
    "unique_consecutive",
    "unique_dim",
}
# Operators that take tensors of both places.
CROSSING = {"_to_copy", "copy_"}


class Far(Tensor):
    """A tensor on the pretended device; `near` holds its numbers."""

    near: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, near: Tensor) -> "Far":
        shape = {"strides": near.stride(), "storage_offset": near.storage_offset()}
        made = torch.Tensor._make_wrapper_subclass(cls, near.shape, dtype=near.dtype, device=f"{NAME}:0", **shape)
        made.near = near
        return made

    def __init__(self, near: Tensor) -> None: ...

    def data_ptr(self) -> int:
        return self.near.data_ptr()

    def as_subclass(self, cls: Any) -> "Far":  # type: ignore[override]
        return self

    def __deepcopy__(self, memo: Any) -> "Far":
        copy = Far(self.near.clone()).requires_grad_(self.requires_grad)
        return memo.setdefault(id(self), copy)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} on the pretended device, outside of PretendDevice")


class PretendDevice(TorchDispatchMode):
    """Runs operators on `Far` tensors. `waits` are those for which the host would have waited for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        device = kwargs.get("device")
        given = {id(t.near): t for t in tensors if isinstance(t, Far)}
        tracing = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
        if tracing or (not given and not _is_far(device)):
            return func(*args, **kwargs)
        if func.namespace == "dpquant":  # of this library: its own operators are to be seen
            with self:
                return func.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **kwargs)
        self._note(func, args, kwargs, tensors)
        if device is not None:
            kwargs["device"] = torch.device("cpu")
        args, kwargs = tree_map(lambda v: v.near if isinstance(v, Far) else v, (args, kwargs))
        result = func(*args, **kwargs)
        if device is not None and device.type != NAME:
            return result
        if func._schema.name == "aten::copy_" and not isinstance(tensors[0], Far):
            return tensors[0]
        return tree_map(lambda v: given[id(v)] if id(v) in given else _far(v), result)

    def _note(self, func: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor]) -> None:
        self.operators += 1
        name = func._schema.name.removeprefix("aten::")
        near = [t for t in tensors if not isinstance(t, Far) and t.dim() > 0]
        masks = name in ("index", "index_put", "index_put_", "_index_put_impl_") and any(
            t.dtype in (torch.bool, torch.uint8) for t in tensors[1:]
        )
        if near and len(near) < len(tensors) and name not in CROSSING:
            raise RuntimeError(f"{name} takes tensors of the device and of the host:\n{_lines()}")
        crosses = name in CROSSING and (kwargs.get("device") is not None or len(near) == 1)
        blocks = crosses and not (kwargs.get("non_blocking") or any(arg is True for arg in args))
        if name in READS or masks or (blocks and not _stays(name, kwargs, tensors)):
            self.waits.append(f"{name}:\n{_lines()}")

    def copy_from(self, near: Tensor, far: Tensor, non_blocking: bool = False) -> Tensor:
        assert isinstance(far, Far) and not isinstance(near, Far)
        far.near.copy_(near)
        if not non_blocking:
            self.waits.append(f"copy of numbers:\n{_lines()}")
        return far


def _stays(name: str, kwargs: dict[str, Any], tensors: list[Tensor]) -> bool:
    """Whether a copy has both ends on the device."""
    to = kwargs.get("device")
    return all(isinstance(t, Far) for t in tensors) and (to is None or to.type == NAME)


def _empty_strided(size: Any, stride: Any, dtype: Any = None, **_: Any) -> Tensor:
    return Far(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))


def _draw(key: bytes, first: int, std: float, out: Tensor) -> None:
    near = out.near if isinstance(out, Far) else out
    near.copy_(device_normals.reference_normals(key, first, std, near.numel()))


def _is_far(device: Any) -> bool:
    return device is not None and torch.device(device).type == NAME


def _far(value: Any) -> Any:
    return Far(value) if isinstance(value, Tensor) else value


def _lines() -> str:
    """Where the call comes from: the lines of this library, the innermost last."""
    own = [f for f in traceback.extract_stack() if any(p in f.filename for p in ("dpquant_compile", "/backends/"))]
    return "".join(f"  {Path(f.filename).name}:{f.lineno} {f.line}\n" for f in own[-6:])


@contextmanager
def pretend_device() -> Any:
    """The device inside the block, as a `PretendDevice`. For a process of its own."""
    _setup_privateuseone_for_python_backend(NAME)
    library = torch.library.Library("aten", "IMPL")
    fake = FakeTensorMode.from_tensor

    def from_tensor(mode: FakeTensorMode, tensor: Tensor, **options: Any) -> Any:
        if not isinstance(tensor, Far):
            return fake(mode, tensor, **options)
        with mode:
            like = {"dtype": tensor.dtype, "device": tensor.device}
            return torch.empty_strided(tensor.shape, tensor.stride(), **like)

    FakeTensorMode.from_tensor = from_tensor  # type: ignore[method-assign]
    # Private training refuses modes; this one is no part of the program but what it runs on.
    sending._TAKES_AT_ONCE.add(NAME)
    # Noise is drawn on the device, as on a GPU, and as if the CPU were one, so that runs on both can be compared.
    device_normals.can_draw = lambda _: True
    device_normals.draw_on_device = _draw
    modes = hooks._get_current_dispatch_mode_stack
    hooks._get_current_dispatch_mode_stack = lambda: [m for m in modes() if not isinstance(m, PretendDevice)]
    with PretendDevice() as device, torch.autograd.set_multithreading_enabled(False):
        # What torch copies to a device where no mode sees it: the numbers of torch.tensor([…]), a list as an index.
        library.impl("empty_strided", _empty_strided, "PrivateUse1")
        library.impl("_copy_from", device.copy_from, "PrivateUse1")
        yield device


def notes_of(module: str, function: str, *args: Any) -> Any:
    """What `function` of a test module gives, called with a `PretendDevice` and JSON values in a process of its own."""
    code = (
        "import json, sys\n"
        f"from {module} import {function}\n"
        "from tests.support.pretend_device import pretend_device\n"
        "with pretend_device() as device:\n"
        f"    result = {function}(device, *json.loads(sys.argv[1]))\n"
        "print(json.dumps(result))\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, json.dumps(args)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])
