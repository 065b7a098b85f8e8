"""Tests of `dpquant_compile.privacy.distributed`."""
