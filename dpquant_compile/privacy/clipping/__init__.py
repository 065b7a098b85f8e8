"""Per-sample clipping inside the compiled program."""
