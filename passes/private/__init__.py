"""Passes over the joint graph of private training."""

# Registers the operators that these passes look for.
import dpquant_compile.backends.ops.group_norm
import dpquant_compile.backends.ops.private_site
import dpquant_compile.backends.ops.relu_bits  # noqa: F401
