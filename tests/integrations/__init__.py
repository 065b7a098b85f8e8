"""Tests of `dpquant_compile.integrations`."""
