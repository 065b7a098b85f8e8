"""Poisson batches and losses that keep samples apart."""
