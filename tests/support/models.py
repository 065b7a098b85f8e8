"""Small models that the tests share, one per thing that a model may do to a compiler, and how to capture them."""

import inspect
import re
import textwrap
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from dpquant_compile import pipeline
from dpquant_compile.errors import CaptureError
from dpquant_compile.passes.batch.track_batch import track_batch
from dpquant_compile.passes.batch.verify_isolation import verify_isolation
from dpquant_compile.passes.capture import capture_dynamo, capture_fx
from dpquant_compile.passes.runner import PassRecord, run_passes

# Helpers


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """A model with the same weights each time."""
    torch.manual_seed(seed)
    return make()


def traced(model: nn.Module, given: tuple[str, ...] | None = None) -> fx.GraphModule:
    """The fx graph of a model that fx can trace, with the optional arguments in `given`, or with all."""
    parameters = inspect.signature(model.forward).parameters.values()
    gm = capture_fx(model, [p.name for p in parameters if p.default is not p.empty] if given is None else given)
    assert not isinstance(gm, CaptureError), gm
    return gm


def after(gm: fx.GraphModule, *passes: Any) -> fx.GraphModule:
    """The graph after some passes, checked by the runner."""
    return run_passes(gm, passes, origin="test", log=[])


def canonical(model: nn.Module, *args: Any, dynamo: bool = False) -> fx.GraphModule:
    """The canonical graph with sites marked; by Dynamo on `args`, or by fx."""
    gm = capture_dynamo(model, args, {})[0] if dynamo else traced(model)
    return pipeline.canonical(gm, [])


def tracked(model: nn.Module, *args: Any, log: list[PassRecord] | None = None) -> fx.GraphModule:
    """The canonical graph that has followed the batch of `args`."""
    return pipeline.tracked(canonical(model), args, {}, True, log if log is not None else [])


def program(gm: fx.GraphModule) -> str:
    """The code of a graph for golden prints: long lines wrapped, and without the clean-up at their ends."""
    code = re.sub(r";  (\w+ = )+None$", "", gm.code.strip(), flags=re.MULTILINE)
    lines = (textwrap.wrap(line, 110, subsequent_indent=" " * 8, break_on_hyphens=False) for line in code.splitlines())
    return "\n".join(part for wrapped in lines for part in wrapped)


def state(model: nn.Module) -> dict[str, Tensor]:
    """A copy of every parameter and buffer."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {name: tensor.detach().clone() for name, tensor in tensors}


def gradients(model: Callable[..., Any], inputs: list[Tensor], parameters: list[nn.Parameter]) -> list[Tensor | None]:
    """Gradients of a weighted sum of all outputs, for inputs that require them and for parameters."""
    result = model(*inputs)
    outputs = [leaf for leaf in torch.utils._pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
    loss = sum((out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum() for out in outputs)
    wanted = [x for x in inputs if x.requires_grad] + parameters
    return [*outputs, *torch.autograd.grad(loss, wanted, allow_unused=True)]


# Convolutions


class Residual(nn.Module):
    """A residual block with GroupNorm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(2, width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(F.relu(self.norm1(self.conv1(x))))


class GroupNormNet(nn.Module):
    """A residual CNN; images [B, 3, 8, 8] to 5 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, stride=2, padding=1)
        self.blocks = nn.Sequential(Residual(4), Residual(4))
        self.fc = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.stem(x))
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


class BatchNormNet(nn.Module):
    """In-place ReLU, `+=` and BatchNorm, as torchvision writes ResNets; images [B, 3, 8, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(x))
        out += x
        out = self.relu(out)
        return self.fc(out.mean((2, 3)))


def conv_zoo() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    """Every kind of convolution, each with the shape of one batch."""
    zoo: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
        "conv1d": (nn.Conv1d(4, 6, 3), (3, 4, 9)),
        "conv3d": (nn.Conv3d(2, 4, (1, 2, 3), padding=(0, 1, 1)), (3, 2, 3, 4, 5)),
        "grouped": (nn.Conv2d(4, 6, 3, groups=2), (3, 4, 6, 6)),
        "depthwise": (nn.Conv2d(4, 8, 3, groups=4, bias=False), (3, 4, 6, 6)),
        "dilated": (nn.Conv2d(2, 3, 3, dilation=(2, 1)), (3, 2, 8, 7)),
        "strided": (nn.Conv2d(2, 3, 3, stride=(2, 3), padding=(1, 0)), (3, 2, 8, 9)),
        "valid": (nn.Conv2d(2, 3, 3, padding="valid"), (3, 2, 6, 6)),
        "same": (nn.Conv2d(2, 3, (3, 5), padding="same", dilation=(2, 1)), (3, 2, 6, 7)),
        "same_even": (nn.Conv2d(2, 3, (4, 3), padding="same"), (3, 2, 6, 7)),
        "same_even_1d": (nn.Conv1d(2, 3, 4, padding="same", dilation=3), (3, 2, 11)),
        "same_even_3d": (nn.Conv3d(1, 2, (2, 3, 2), padding="same"), (3, 1, 4, 4, 5)),
    }
    for mode in ("reflect", "replicate", "circular"):
        zoo[mode] = (nn.Conv2d(2, 3, 3, padding=(1, 2), padding_mode=mode), (3, 2, 6, 7))
    zoo["reflect_same"] = (nn.Conv2d(2, 3, (3, 4), padding="same", padding_mode="reflect"), (3, 2, 6, 7))
    return zoo


class Transposed(nn.Module):
    """A convolution and its transpose; images [B, 2, 6, 6]."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(2, 4, 3, stride=2)
        self.up = nn.ConvTranspose2d(4, 2, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(x))


# Attention and text


class Attention(nn.Module):
    """nn.MultiheadAttention called with one, two or three different inputs."""

    def __init__(self, kind: str = "self", need_weights: bool = True, average: bool = True, **options: Any) -> None:
        super().__init__()
        if kind == "kdim":
            options |= {"kdim": 6, "vdim": 10}
        self.attn = nn.MultiheadAttention(8, 2, **options)
        self.kind = kind
        self.need_weights, self.average = need_weights, average

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None = None, mask: Tensor | None = None
    ) -> Any:
        if self.kind == "self":
            key = value = query
        elif self.kind == "cross":
            value = key
        return self.attn(
            query, key, value, padding, self.need_weights, attn_mask=mask, average_attn_weights=self.average
        )


class TextNet(nn.Module):
    """Embedding, a layer that is called twice, a head that shares the embedding's weight; tokens [B, T]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = torch.tanh(self.mix(x))
        x = torch.tanh(self.mix(x))
        return self.head(x.mean(1))


class TimeFirst(nn.Module):
    """A linear on [T, B, K], one on [B*T, K], one on [T*B, K]; input [B, T, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.time, self.folded, self.swapped = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        b, t, k = x.shape
        x = self.plain(x)
        x = self.time(x.transpose(0, 1)).transpose(0, 1)
        x = self.folded(x.reshape(b * t, k)).view(b, t, k)
        x = self.swapped(x.permute(1, 0, 2).reshape(t * b, k))
        return x.view(t, b, k).transpose(0, 1)


# Weights that are no layers


class Functional(nn.Module):
    """Plain parameters in F.conv2d and F.linear, and a weight that is computed; images [B, 2, 5, 5]."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(3, 2, 3, 3))
        self.table = nn.Parameter(torch.randn(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = F.conv2d(x, self.kernel, padding=1)
        standard = self.kernel - self.kernel.mean((1, 2, 3), keepdim=True)
        x = x + F.conv2d(x[:, :2], weight=standard, stride=1, padding=1)
        return F.linear(x.mean((2, 3)), self.table)


class Hyper(nn.Module):
    """A weight that depends on the batch; input [B, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.make = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.make(x).mean(0).view(2, 4)
        return F.linear(x, weight)


# What capture must take care of


class Branch(nn.Module):
    """Control flow on a value, which fx cannot trace and Dynamo can, since it is a shape."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if x.shape[1] > 3:
            x = x.relu()
        return self.second(x)


class DataBranch(nn.Module):
    """Control flow on data, which no graph holds."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            x = self.fc(x)
        return x


class Counting(nn.Module):
    """A buffer that each forward changes; input [B, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        self.mean.mul_(0.5).add_(x.detach().mean(0))
        return self.fc(x) + self.calls


class Hooked(nn.Module):
    """A linear with a hook between two without; input [B, 4]. `seen` counts the hook's calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.watched, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.seen: list[torch.Size] = []
        self.watched.register_forward_hook(lambda module, args, out: self.seen.append(out.shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.watched(self.first(x)))


def proved(model: nn.Module, *args: Tensor, dynamo: bool = False) -> fx.GraphModule:
    """The graph of the model, after track_batch and verify_isolation."""
    gm = canonical(model, *args, dynamo=dynamo)
    try:
        track_batch(gm, args=args, kwargs={})
    except CaptureError:
        track_batch(gm, args=args, kwargs={}, any_batch=False)
    result = verify_isolation(gm, args=args, kwargs={})
    assert result.modified is False and result.graph_module is gm
    return gm
