"""Kernels that run a site in low precision, and the torch.compile backend that lowers graphs to them."""

if __name__ != "dpquant_compile.backends":
    raise ImportError("import dpquant_compile.backends, not the bare folder `backends`")

# Backends register their kernels when imported; a new one is one file and one line here.
from dpquant_compile.backends.reference import emulated  # noqa: I001  (the reference comes first: others name it)
from dpquant_compile.backends import compiled
from dpquant_compile.backends.cpu_int8 import kernel as cpu_int8
from dpquant_compile.backends.triton import kernel as triton

__all__ = ["compiled", "cpu_int8", "emulated", "triton"]
