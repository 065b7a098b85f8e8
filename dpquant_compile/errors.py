"""Every error that dpquant_compile raises on purpose.

Each message names the thing at fault (a site, a node, a parameter, an argument), the source line where it is known, and
the fix. All derive from `DPQuantError` and from a fitting built-in, so that code written against the built-ins works.
"""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

__all__ = [
    "BudgetError",
    "CaptureError",
    "CheckpointError",
    "CompileSpecError",
    "DPQuantError",
    "DistributedError",
    "FormatError",
    "GraphInvariantError",
    "InplaceAliasError",
    "IntegrationError",
    "IsolationError",
    "KernelError",
    "LabError",
    "LedgerError",
    "NonFiniteError",
    "NotCapturedError",
    "OperatorArgumentError",
    "PerSampleGradientError",
    "PrivacyBudgetError",
    "PrivacySpecError",
    "PrivateTrainingError",
    "RegistryError",
    "SiteError",
    "TorchVersionError",
]


def listing(names: Sequence[str], limit: int = 60) -> str:
    """Names for a message: all of them up to `limit`, then a count of the rest."""
    shown = ", ".join(names[:limit])
    rest = len(names) - limit
    return f"{shown}, and {rest} more" if rest > 0 else shown


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A question for the end of a message, with a leading space; empty if no known word is similar."""
    near = get_close_matches(word, list(known), 1)
    return f" Did you mean {near[0]}?" if near else ""


class DPQuantError(Exception):
    """Base of all errors raised on purpose by dpquant_compile."""


class BudgetError(DPQuantError, ValueError):
    """The budget k does not fit the n sites of the model."""


class SiteError(DPQuantError, KeyError):
    """A policy or a selection names a site that the model does not have."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class TorchVersionError(DPQuantError, ImportError):
    """The installed torch is of a minor release that this release of dpquant-compile was not made for."""


class FormatError(DPQuantError, ValueError):
    """An unknown number format, or a tensor that the format cannot take."""


class NonFiniteError(DPQuantError, ValueError):
    """A tensor that must be quantized holds NaN or infinity."""


class CompileSpecError(DPQuantError, ValueError):
    """An argument of `compile` or of the torch.compile backend is out of its domain."""


class CaptureError(DPQuantError, RuntimeError):
    """The model cannot be turned into one graph."""


class NotCapturedError(DPQuantError, RuntimeError):
    """A graph was requested before the first forward of a model that only Dynamo can capture."""


class InplaceAliasError(DPQuantError, RuntimeError):
    """An in-place operation changes a value that is still read under another name."""


class GraphInvariantError(DPQuantError, RuntimeError):
    """A pass left the graph in a state that violates its contract."""


class KernelError(DPQuantError, RuntimeError):
    """No kernel of the requested backend can run a site."""


class RegistryError(DPQuantError, KeyError):
    """A name is registered twice, or a name that was looked up is not registered."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class OperatorArgumentError(DPQuantError, AttributeError):
    """An argument of an operator is read or given under a name that its schema does not have."""


class IsolationError(DPQuantError, RuntimeError):
    """A model lets one sample of a batch change the gradient of another sample."""


class PerSampleGradientError(DPQuantError, RuntimeError):
    """A parameter is used in a way that has no per-sample gradient."""


class PrivacySpecError(DPQuantError, ValueError):
    """An argument of `PrivacyEngine.make_private` is out of its domain, or does not fit the others."""


class PrivateTrainingError(DPQuantError, RuntimeError):
    """A training loop does something that would break the privacy guarantee."""


class IntegrationError(DPQuantError, RuntimeError):
    """A trainer is missing, or is set up in a way that private training cannot make right."""


class LabError(DPQuantError, ValueError):
    """A task, a configuration, data or a run folder of the lab cannot be used."""


class LedgerError(DPQuantError, RuntimeError):
    """A privacy ledger is corrupt, lost, in use, of another version, or does not fit what it is used with."""


class PrivacyBudgetError(DPQuantError, RuntimeError):
    """A release would exceed the privacy budget, or no noise can keep it."""


class DistributedError(DPQuantError, RuntimeError):
    """Processes that train together have diverged, or one of them has ended."""


class CheckpointError(DPQuantError, RuntimeError):
    """A checkpoint cannot be read, or belongs to another model, configuration or version."""
