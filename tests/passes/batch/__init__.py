"""Tests of `dpquant_compile.passes.batch`."""
