"""Tests of `dpquant_compile.backends.triton`."""
