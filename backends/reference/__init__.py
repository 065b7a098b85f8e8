"""Every product in plain torch: what other kernels are compared with."""
