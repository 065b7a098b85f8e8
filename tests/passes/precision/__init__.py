"""Tests of `dpquant_compile.passes.precision`."""
