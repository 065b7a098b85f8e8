"""Tests of `dpquant_compile.backends.cpu_int8`."""
