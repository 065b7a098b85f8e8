"""Tests of `dpquant_compile.numerics`."""
