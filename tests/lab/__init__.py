"""Tests of `dpquant_compile.lab`."""
