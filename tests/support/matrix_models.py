"""Models whose linears are written as products with a matrix parameter."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Each is a linear from [B, 3, 6] to [B, 3, 4]; `w` is [in, out], `v` is [out, in].
SPELLINGS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "@": lambda self, x: x @ self.w,
    "@ transposed": lambda self, x: x @ self.v.t(),
    "matmul": lambda self, x: torch.matmul(x, self.w),
    "matmul from the left": lambda self, x: (self.v @ x.transpose(1, 2)).view(x.shape[0], 4, 3).transpose(1, 2),
    "mm": lambda self, x: x.reshape(-1, 6).mm(self.w).view(x.shape[0], 3, 4),
    "addmm": lambda self, x: torch.addmm(self.b, x.reshape(-1, 6), self.w).view(x.shape[0], 3, 4),
    "addmm with factors": lambda self, x: torch.addmm(self.b, x.reshape(-1, 6), self.v.T, beta=0.5, alpha=2).view(
        x.shape[0], 3, 4
    ),
    "addmm to the batch": lambda self, x: torch.addmm(x.reshape(-1, 6)[:, :4], x.reshape(-1, 6), self.w).view(
        x.shape[0], 3, 4
    ),
    "bmm": lambda self, x: torch.bmm(x, self.w.expand(x.shape[0], 6, 4)),
    "baddbmm": lambda self, x: torch.baddbmm(self.b, x, self.v.unsqueeze(0).transpose(1, 2).expand(x.shape[0], -1, -1)),
    "einsum": lambda self, x: torch.einsum("bti,io->bto", x, self.w),
    "einsum of [out, in]": lambda self, x: torch.einsum("oi, ...i -> ...o", self.v, x),
    "einsum without an output": lambda self, x: torch.einsum("bti,io", x, self.w).transpose(1, 2),
    "einsum with an ellipsis, without an output": lambda self, x: torch.einsum("...i,ik", x, self.w),
    "einsum over the middle": lambda self, x: torch.einsum("bit,io->bot", x.transpose(1, 2), self.w).transpose(1, 2),
    "tensordot": lambda self, x: torch.tensordot(x, self.v, dims=([2], [1])),
    "linear": lambda self, x: F.linear(x, self.w.t(), self.b),
    "linear, turned twice": lambda self, x: F.linear(x, self.v.t().transpose(0, 1)),
}


class Spelled(nn.Module):
    """One spelling, between two nonlinear functions; [B, 3, 6]."""

    def __init__(self, spelling: str) -> None:
        super().__init__()
        self.w, self.v = (nn.Parameter(torch.randn(shape) * 0.4) for shape in ((6, 4), (4, 6)))
        self.b = nn.Parameter(torch.randn(4))
        self.function = SPELLINGS[spelling]

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.function(self, torch.sin(x)))


class TiedBothWays(nn.Module):
    """A table that is an embedding, a head, and with the head's outputs a transposed linear; tokens [B, 5] of 7."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(7, 4), nn.Embedding(9, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens) + self.places(torch.arange(tokens.shape[1]))
        words = F.linear(torch.tanh(x), self.table.weight)
        return torch.softmax(words, -1) @ self.table.weight


class TiedHead(nn.Module):
    """An embedding that is the head's weight, too, or with `turned` its transpose is; tokens [B, 5] of 7."""

    def __init__(self, turned: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 7 if turned else 4)
        self.turned = turned

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.tanh(self.table(tokens))
        return x @ self.table.weight if self.turned else F.linear(x, self.table.weight)
