"""Tests of `dpquant_compile.perf`."""
