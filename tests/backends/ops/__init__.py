"""Tests of `dpquant_compile.backends.ops`."""
