"""DP-SGD on compiled models: per-sample clipping inside the program, noise, loaders, optimizers, the engine."""
