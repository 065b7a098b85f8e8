"""Noise, the optimizer that adds it, and the run's secret random bits."""
