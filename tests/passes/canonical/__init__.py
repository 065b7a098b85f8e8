"""Tests of `dpquant_compile.passes.canonical`."""
