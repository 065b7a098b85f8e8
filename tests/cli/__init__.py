"""Tests of `dpquant_compile.cli`."""
