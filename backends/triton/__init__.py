"""Exact int8 products on NVIDIA GPUs, in Triton."""
