"""Tests of `dpquant_compile.view`."""
