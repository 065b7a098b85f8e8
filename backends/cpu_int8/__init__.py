"""Exact int8 products on the CPU, in C++."""
