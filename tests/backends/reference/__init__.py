"""Tests of `dpquant_compile.backends.reference`."""
