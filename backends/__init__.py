"""Kernels that run a site in low precision, and the torch.compile backend that lowers graphs to them."""

if __name__ != "dpquant_compile.backends":
    raise ImportError("import dpquant_compile.backends, not the bare folder `backends`")
