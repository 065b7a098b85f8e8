"""A step without clipping, of a family that rounds operands once and multiplies what it keeps of them."""

from typing import Protocol

import torch
from torch import Tensor

from dpquant_compile.backends.cpu_int8.sized_call import shapes_of
from dpquant_compile.backends.registry import Arithmetic, SiteCall, Streams

__all__ = ["ByOperands"]


class ByOperands(Arithmetic, Protocol):
    """`Arithmetic` whose three products without clipping are made of its `operand`, `packed` and products of these."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, call: SiteCall, streams: Streams) -> Tensor:
        operand, packed = self.operand(x, "input", call, streams), self.packed(weight, call, streams)
        return self.product(operand, packed, bias, shapes_of(x, weight, call), call, streams)

    def grad_input(self, grad: Tensor, x: Tensor, weight: Tensor, call: SiteCall, streams: Streams) -> Tensor:
        operand, packed = self.operand(grad, "grad_output", call, streams), self.packed(weight, call, streams)
        return self.product_grad_input(operand, packed, shapes_of(x, weight, call), call, streams)

    def grad_weight(self, grad: Tensor, x: Tensor, weight: Tensor, call: SiteCall, streams: Streams) -> Tensor:
        shapes = shapes_of(x, weight, call)
        operands = self.operand(x, "input", call, streams), self.operand(grad, "grad_output", call, streams)
        ones = torch.ones(shapes.batch, dtype=torch.float32, device=x.device)
        return self.weighted_grad(*operands, ones, shapes, call, streams)
