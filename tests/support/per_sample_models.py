"""Small models, one for each kind of parameter that a per-sample gradient rule has to handle."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Norms(nn.Module):
    """Every norm layer with affine parameters; input [B, 4, 6]."""

    def __init__(self) -> None:
        super().__init__()
        self.group = nn.GroupNorm(2, 4)
        self.instance = nn.InstanceNorm1d(4, affine=True)
        self.layer = nn.LayerNorm((4, 6))
        self.last = nn.LayerNorm(6)
        self.rms = nn.RMSNorm(6)
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.instance(torch.tanh(self.group(x))))
        return self.fc(torch.tanh(self.rms(self.last(self.layer(x) * 1.5))).mean(1))


class ClassToken(nn.Module):
    """A ViT in small: patches, class token, positions, attention; images [B, 3, 8, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, stride=4)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.position = nn.Parameter(torch.randn(1, 5, 8))
        self.gain = nn.Parameter(torch.randn(8))
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        token = self.token.expand(x.shape[0], -1, -1) * self.gain  # constant, with a row per sample
        x = torch.cat([token, x], 1) + self.position
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return self.head(x[:, 0])


class Adapter(nn.Module):
    """A frozen linear with a low-rank adapter, a scale, and a parameter that only some elements of are used."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6)
        self.base.requires_grad_(False)
        self.down = nn.Linear(6, 2, bias=False)
        self.up = nn.Linear(2, 6, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.table = nn.Parameter(torch.randn(4, 6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x) + self.up(self.down(x)) * self.scale
        return torch.tanh(y) * self.table[0] + F.linear(y, self.table[1:3]).sum(-1, keepdim=True)


class Generic(nn.Module):
    """Parameters in operators without a rule of their own: einsum, PReLU, transposed conv."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(4, 3, 5))
        self.slope = nn.PReLU(5)
        self.pair = nn.Linear(5, 4)
        self.up = nn.ConvTranspose1d(1, 2, 3)
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x)
        y = self.slope(torch.einsum("bi,ijk->bjk", x, self.mix).sum(1))
        z = self.pair(y)
        return self.up(z[:, None]).flatten(1)


class Merged(nn.Module):
    """A weight computed of two parameters, one of which is also used alone; input [B, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.left = nn.Parameter(torch.randn(4, 2))
        self.right = nn.Parameter(torch.randn(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(F.linear(x, self.weight + self.left @ self.right))
        return F.linear(y, self.weight * 0.5) @ self.left
