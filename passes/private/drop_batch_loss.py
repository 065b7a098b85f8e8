"""Drop the loss that a model computes of a whole batch: it mixes samples, and private training has no use for it."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from dpquant_compile.errors import PrivateTrainingError
from dpquant_compile.passes.fx_utils import copy_graph, graph_module_over
from dpquant_compile.passes.runner import PassResult

__all__ = ["BatchLoss", "drop_batch_loss", "with_batch_loss"]

_DROPPED = "batch_loss"  # key in the metadata of the output node


def drop_batch_loss(gm: fx.GraphModule) -> PassResult:
    """Return None in place of a field `loss` of the output that is one number, and do not compute it.

        return CausalLMOutput(loss=cross_entropy(logits.view(…), labels.view(…)), logits=logits)
        →  return CausalLMOutput(loss=None, logits=logits)

    Nothing else that is made of `labels` is touched: decoders may read them. A loss with a row per sample is kept.
    Requires: `track_batch`; a functional graph, in which a node without users has no effect.
    Ensures: the other outputs and all placeholders are the same. A graph without such a loss is returned itself;
    another one is copied. `with_batch_loss` finds the place of a dropped loss.
    Numerics: unchanged.
    """
    found = _loss_field(gm)
    if found is None:
        return PassResult(gm, False)
    place, kind = found
    gm = graph_module_over(gm, copy_graph(gm.graph), gm._get_name())
    output = gm.graph.output_node()
    leaves, spec = tree_flatten(output.args[0])
    unused = [leaves[place]]
    leaves[place] = None
    output.args = (tree_unflatten(leaves, spec),)
    output.meta[_DROPPED] = (place, kind)
    while unused:
        node = unused.pop()
        if not node.users and node.op != "placeholder":
            sources = node.all_input_nodes
            gm.graph.erase_node(node)
            unused += [source for source in sources if source not in unused]
    return PassResult(gm, True)


def _loss_field(gm: fx.GraphModule) -> tuple[int, str] | None:
    """The place of the loss among the leaves of the output, and the type of the output."""
    graph: Any = gm.graph
    leaves, spec = tree_flatten(graph.output_node().args[0])
    fields = graph._codegen.process_outputs(tree_unflatten(list(range(len(leaves))), spec))
    place = fields.get("loss") if isinstance(fields, Mapping) else None
    if not isinstance(place, int) or not isinstance(leaves[place], fx.Node):
        return None
    return (place, type(fields).__name__) if leaves[place].meta.get("shape") == () else None


def with_batch_loss(output: fx.Node, leaves: Sequence[Any]) -> list[Any]:
    """The leaves of the output of a program, with a `BatchLoss` in the place of a loss that was dropped."""
    place, kind = output.meta.get(_DROPPED, (None, ""))
    return [BatchLoss(kind) if i == place else leaf for i, leaf in enumerate(leaves)]


# The fitting loss, by words in the name of the type of the output.
_FITTING = {
    "CausalLM": "CausalLMLoss()",
    "SequenceClassifier": "SequenceClassificationLoss()",
    "ImageClassifier": "SequenceClassificationLoss()",
    "TokenClassifier": "TokenClassificationLoss()",
    "MaskedLM": "TokenClassificationLoss()",
    "Seq2SeqLM": "TokenClassificationLoss()",
}


class BatchLoss:
    """Stands for the loss that a model would have computed of a whole batch. Whatever is done with it is refused."""

    def __init__(self, kind: str) -> None:
        """`kind` is the type of the model's output."""
        self.__dict__["_kind"] = kind

    def __repr__(self) -> str:
        return "<the loss of the whole batch, which private training cannot use>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # for what only looks whether it is there
        raise self._refusal()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = next((x for x in tree_leaves((args, kwargs or {})) if isinstance(x, BatchLoss)), BatchLoss(""))
        raise found._refusal()

    def _refusal(self) -> PrivateTrainingError:
        fitting = next((loss for word, loss in _FITTING.items() if word in self._kind), None)
        loss = "dpq.losses." + (fitting or 'on_field("logits", your_loss)')
        return PrivateTrainingError(
            "the loss that the model computes from labels= is one number for the whole batch: the gradient of a sample "
            "would depend on the others, and then clipping does not bound what one sample can change. Fix: compute "
            "one loss per sample from the model's output, with the criterion that make_private returned:\n"
            f"    model, optimizer, criterion, loader = engine.make_private(..., criterion={loss})\n"
            "    criterion(model(**batch), labels).backward()"
        )


def _refuse(self: BatchLoss, *_: Any) -> Any:
    raise self._refusal()


_OPERATORS = "add sub mul truediv floordiv mod pow matmul".split()
for _name in (*_OPERATORS, *(f"r{name}" for name in _OPERATORS), *"neg abs float int bool format lt le gt ge".split()):
    setattr(BatchLoss, f"__{_name}__", _refuse)
