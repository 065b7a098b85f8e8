"""One training step on random images: its output and gradients, and how far two of them are apart."""

import torch
from torch import Tensor, nn


def images(batch: int, size: int = 8, seed: int = 0) -> Tensor:
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(seed))


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Output and gradients of one training step."""
    model.zero_grad()
    out = model(x)
    (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
    return [out.detach(), *(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None)]


def error(got: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest difference, relative to the scale of each tensor."""
    assert len(got) == len(wanted)
    return max(((a - b).norm() / (b.norm() + 1e-12)).item() for a, b in zip(got, wanted, strict=True))
