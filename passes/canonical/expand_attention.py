"""Pass: write nn.MultiheadAttention as linears and dot products, so that its projections become sites."""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from dpquant_compile.passes.canonical.inline_modules import has_hooks
from dpquant_compile.passes.runner import PassResult

__all__ = ["expand_attention"]

_MODULE_ARGS = "query key value key_padding_mask need_weights attn_mask average_attn_weights is_causal".split()
_FUNCTION_ARGS = (
    "query key value embed_dim_to_check num_heads in_proj_weight in_proj_bias bias_k bias_v add_zero_attn dropout_p "
    "out_proj_weight out_proj_bias training key_padding_mask need_weights attn_mask use_separate_proj_weight "
    "q_proj_weight k_proj_weight v_proj_weight static_k static_v average_attn_weights is_causal"
).split()
_DEFAULTS = {"need_weights": True, "average_attn_weights": True, "is_causal": False, "training": True}
_MODULE_TENSORS = "in_proj_weight in_proj_bias q_proj_weight k_proj_weight v_proj_weight bias_k bias_v".split()


@dataclass(frozen=True)
class _Attention:
    """The constants of one attention call, fixed at capture."""

    owner: str
    heads: int
    width: int
    batch_first: bool
    zero_attention: bool
    dropout: float
    need_weights: bool
    average: bool
    is_causal: bool


def expand_attention(gm: fx.GraphModule) -> PassResult:
    """Replace each attention module, or `F.multi_head_attention_forward` call, by its parts.

        attn = self.attn(x, x, x, need_weights=False)
        →  in_proj = F.linear(x.transpose(1, 0), attn.in_proj_weight, attn.in_proj_bias); …
           out_proj = F.linear(context, attn.out_proj.weight, attn.out_proj.bias)

    Requires: batched (3-d) queries; which masks are given, need_weights and dropout are constants of the graph.
    Ensures: each projection is an `F.linear` node with node.meta["site_hint"], the name of its site.
    Numerics: those of torch's unfused path, bit for bit (its inference-only fast path rounds differently).
    """
    found = [node for node in gm.graph.nodes if _is_attention(gm, node)]
    for node in found:
        spec, tensors, masks, inputs = _read_module(gm, node) if node.op == "call_module" else _read_function(node)
        _inline(gm.graph, node, spec, tensors, masks, inputs)
    return PassResult(gm, bool(found))


def _is_attention(gm: fx.GraphModule, node: fx.Node) -> bool:
    if node.op == "call_module":
        module = gm.get_submodule(str(node.target))
        return isinstance(module, nn.MultiheadAttention) and not has_hooks(module)
    if node.op != "call_function" or node.target is not F.multi_head_attention_forward:
        return False
    # No public module passes static keys or values; such a call stays as it is, and mark_sites says why.
    return node.kwargs.get("static_k") is None and len(node.args) <= _FUNCTION_ARGS.index("static_k")


def _bind(node: fx.Node, names: list[str]) -> dict[str, Any]:
    return {**dict.fromkeys(names), **_DEFAULTS, **dict(zip(names, node.args, strict=False)), **node.kwargs}


def _read_module(gm: fx.GraphModule, node: fx.Node) -> tuple[_Attention, dict[str, Any], tuple[Any, Any], list[Any]]:
    name, call = str(node.target), _bind(node, _MODULE_ARGS)
    module = gm.get_submodule(name)
    assert isinstance(module, nn.MultiheadAttention)
    with gm.graph.inserting_before(node):
        tensors = {
            key: gm.graph.get_attr(f"{name}.{key}") for key in _MODULE_TENSORS if getattr(module, key, None) is not None
        }
        tensors["out_weight"] = gm.graph.get_attr(f"{name}.out_proj.weight")
        if module.out_proj.bias is not None:
            tensors["out_bias"] = gm.graph.get_attr(f"{name}.out_proj.bias")
    spec = _Attention(
        owner=name,
        heads=module.num_heads,
        width=module.embed_dim,
        batch_first=module.batch_first,
        zero_attention=module.add_zero_attn,
        dropout=module.dropout if module.training else 0.0,
        need_weights=call["need_weights"],
        average=call["average_attn_weights"],
        is_causal=call["is_causal"],
    )
    return spec, tensors, (call["key_padding_mask"], call["attn_mask"]), [call[k] for k in _MODULE_ARGS[:3]]


def _read_function(node: fx.Node) -> tuple[_Attention, dict[str, Any], tuple[Any, Any], list[Any]]:
    call = _bind(node, _FUNCTION_ARGS)
    tensors = {key: call[key] for key in _MODULE_TENSORS if call[key] is not None}
    if call["use_separate_proj_weight"]:
        tensors.pop("in_proj_weight", None)
    tensors["out_weight"] = call["out_proj_weight"]
    if call["out_proj_bias"] is not None:
        tensors["out_bias"] = call["out_proj_bias"]
    spec = _Attention(
        owner=_owner(call["out_proj_weight"]),
        heads=call["num_heads"],
        width=call["embed_dim_to_check"],
        batch_first=False,
        zero_attention=bool(call["add_zero_attn"]),
        dropout=call["dropout_p"] if call["training"] else 0.0,
        need_weights=call["need_weights"],
        average=call["average_attn_weights"],
        is_causal=call["is_causal"],
    )
    return spec, tensors, (call["key_padding_mask"], call["attn_mask"]), [call[k] for k in _FUNCTION_ARGS[:3]]


def _owner(weight: fx.Node) -> str:
    name: str = weight.meta.get("state", str(weight.target))
    return name.removesuffix("out_proj.weight").removesuffix(".")


def _inline(
    graph: fx.Graph,
    node: fx.Node,
    spec: _Attention,
    tensors: dict[str, Any],
    masks: tuple[Any, Any],
    inputs: list[Any],
) -> None:
    tracer = fx.proxy.GraphAppendingTracer(graph)
    before = set(graph.nodes)

    def proxy(value: Any) -> Any:
        return fx.Proxy(value, tracer) if isinstance(value, fx.Node) else value

    with graph.inserting_before(node):
        weights = {key: proxy(value) for key, value in tensors.items()}
        shared = (inputs[0] is inputs[1] and inputs[1] is inputs[2], inputs[1] is inputs[2])
        results = _attend(spec, [proxy(v) for v in inputs], shared, weights, proxy(masks[0]), proxy(masks[1]))
        parts = tuple(None if part is None else part.node for part in results)
        whole = graph.call_function(tuple, (parts,))
    for new in graph.nodes:
        if new not in before:
            new.meta |= {"source": node.meta.get("source"), "nn_module_stack": node.meta.get("nn_module_stack")}
    for user in list(node.users):
        index = user.args[1] if len(user.args) > 1 else None
        part = parts[index] if isinstance(index, int) and getattr(user.target, "__name__", "") == "getitem" else None
        if part is not None:
            user.replace_all_uses_with(part)
            graph.erase_node(user)
    node.replace_all_uses_with(whole)
    graph.erase_node(node)
    if not whole.users:
        graph.erase_node(whole)


def _attend(
    spec: _Attention,
    inputs: list[Any],
    shared: tuple[bool, bool],
    weights: dict[str, Any],
    padding: Any,
    mask: Any,
) -> tuple[Any, Any]:
    """Batched attention on proxies. The order of operations is that of torch, so that results match bit for bit."""
    if spec.batch_first:
        moved = {id(x): x.transpose(1, 0) for x in ([inputs[0]] if shared[0] else inputs)}
        inputs = [moved[id(inputs[0] if shared[0] else x)] for x in inputs]
    length, batch = inputs[0].size(0), inputs[0].size(1)
    query, key, value = _project_inputs(spec, inputs, shared, weights)
    extra = 0
    if "bias_k" in weights:
        key = torch.cat([key, weights["bias_k"].repeat(1, batch, 1)])
        value = torch.cat([value, weights["bias_v"].repeat(1, batch, 1)])
        extra += 1
    head = spec.width // spec.heads
    query, key, value = (x.view(x.size(0), batch * spec.heads, head).transpose(0, 1) for x in (query, key, value))
    if spec.zero_attention:
        key = torch.cat([key, torch.zeros_like(key[:, :1])], dim=1)
        value = torch.cat([value, torch.zeros_like(value[:, :1])], dim=1)
        extra += 1
    source = key.size(1)
    causal = spec.is_causal and padding is None and not spec.need_weights
    merged = None
    if padding is not None or (mask is not None and not causal):
        arguments = (padding, mask, query, batch, spec.heads, extra, not spec.need_weights)
        merged = query.tracer.create_proxy("call_function", _merge_masks, arguments, {})
    attention = None
    if spec.need_weights:
        scaled, transposed = query * math.sqrt(1.0 / float(head)), key.transpose(-2, -1)
        scores = query.tracer.create_proxy("call_function", _masked_scores, (merged, scaled, transposed), {})
        attention = F.softmax(scores, dim=-1)
        if spec.dropout > 0.0:
            attention = F.dropout(attention, p=spec.dropout)
        context = torch.bmm(attention, value).transpose(0, 1).reshape(length * batch, spec.width)
        attention = attention.view(batch, spec.heads, length, source)
        attention = attention.mean(dim=1) if spec.average else attention
    else:
        query, key, value = (x.view(batch, spec.heads, x.size(1), head) for x in (query, key, value))
        context = F.scaled_dot_product_attention(query, key, value, merged, spec.dropout, causal)
        context = context.permute(2, 0, 1, 3).reshape(batch * length, spec.width)
    output = _site(spec, "out_proj", context, weights["out_weight"], weights.get("out_bias"))
    output = output.view(length, batch, output.size(1))
    return (output.transpose(1, 0) if spec.batch_first else output), attention


def _project_inputs(
    spec: _Attention, inputs: list[Any], shared: tuple[bool, bool], weights: dict[str, Any]
) -> tuple[Any, Any, Any]:
    query, key, _ = inputs
    bias = weights.get("in_proj_bias")
    if "in_proj_weight" not in weights:
        biases = bias.chunk(3) if bias is not None else (None, None, None)
        names = ("q_proj", "k_proj", "v_proj")
        q, k, v = (
            _site(spec, name, x, weights[f"{name}_weight"], biases[i])
            for i, (name, x) in enumerate(zip(names, inputs, strict=True))
        )
        return q, k, v
    weight = weights["in_proj_weight"]
    if shared[0]:
        packed = _unpack(_site(spec, "in_proj", query, weight, bias), 3, spec.width)
        return packed[0], packed[1], packed[2]
    if shared[1]:
        sizes = [spec.width, spec.width * 2]
        parts, biases = weight.split(sizes), bias.split(sizes) if bias is not None else (None, None)
        q = _site(spec, "in_proj.q", query, parts[0], biases[0])
        packed = _unpack(_site(spec, "in_proj.kv", key, parts[1], biases[1]), 2, spec.width)
        return q, packed[0], packed[1]
    parts, biases = weight.chunk(3), bias.chunk(3) if bias is not None else (None, None, None)
    q, k, v = (
        _site(spec, f"in_proj.{name}", x, parts[i], biases[i])
        for i, (name, x) in enumerate(zip("qkv", inputs, strict=True))
    )
    return q, k, v


def _site(spec: _Attention, name: str, x: Any, weight: Any, bias: Any) -> Any:
    y: Any = F.linear(x, weight, bias)
    y.node.meta["site_hint"] = f"{spec.owner}.{name}".removeprefix(".")
    if name != "out_proj":
        y.node.meta["expects_batch_dim"] = 1  # of [length, batch, width]; track_batch checks it
    return y


def _unpack(packed: Any, count: int, width: int) -> Any:
    return packed.unflatten(-1, (count, width)).unsqueeze(0).transpose(0, -2).squeeze(-2).contiguous()


def _merge_masks(
    padding: Tensor | None, mask: Tensor | None, query: Tensor, batch: int, heads: int, extra: int, by_head: bool
) -> Tensor | None:
    """The additive mask of attention, from a key padding mask [B, S], an attention mask [L, S] or [B·H, L, S], or both.

    `extra` columns are open to all, for the bias and the zero that attention may append to its keys. With `by_head` the
    result broadcasts over [B, H, L, S], else over [B·H, L, S]. None if the model's optional masks are not given.
    """

    def additive(m: Tensor) -> Tensor:
        if not torch.is_floating_point(m):
            m = torch.zeros_like(m, dtype=query.dtype).masked_fill(m, float("-inf"))
        return F.pad(m, (0, extra)) if extra else m

    merged = None
    if mask is not None:
        merged = additive(mask)
        merged = merged.unsqueeze(0) if merged.dim() == 2 else merged
    if padding is not None:
        rows = additive(padding)
        rows = rows.view(batch, 1, 1, rows.size(-1)).expand(-1, heads, -1, -1).reshape(batch * heads, 1, rows.size(-1))
        merged = rows if merged is None else merged + rows
    if merged is not None and by_head:
        shared = padding is None and merged.size(0) == 1
        return merged.unsqueeze(0) if shared else merged.view(batch, heads, -1, merged.size(-1))
    return merged


def _masked_scores(mask: Tensor | None, query: Tensor, keys: Tensor) -> Tensor:
    return torch.bmm(query, keys) if mask is None else torch.baddbmm(mask, query, keys)
