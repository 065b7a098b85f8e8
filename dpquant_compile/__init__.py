"""dpquant_compile: a compiler for private low-precision training in PyTorch."""

import dpquant_compile.cli.interrupt  # first, for a Ctrl-C during the imports below
import dpquant_compile.torch_version  # noqa: F401  # before what uses torch's internals
from dpquant_compile import errors, losses
from dpquant_compile.api import compile
from dpquant_compile.batchnorm import replace_batch_norm
from dpquant_compile.module import CompiledModule
from dpquant_compile.numerics.formats import Format, format_names, register_format
from dpquant_compile.numerics.operand_spec import OperandSpec
from dpquant_compile.numerics.quantize import quantize
from dpquant_compile.numerics.recipe import Recipe, recipe_names, register_recipe
from dpquant_compile.passes.batch.check_rule import check_batch_rule
from dpquant_compile.passes.batch.own_rules import register_batch_rule
from dpquant_compile.policy import Policy
from dpquant_compile.privacy.accounting.ledger import Ledger
from dpquant_compile.privacy.accounting.planning import plan
from dpquant_compile.privacy.distributed.world import init_process_group
from dpquant_compile.privacy.engine import PrivacyEngine
from dpquant_compile.privacy.schedule.scheduler import Scheduler
from dpquant_compile.sites import Site, SiteTable
from dpquant_compile.torch_compile import sessions

__version__ = "0.2.0"

__all__ = [
    "CompiledModule",
    "Format",
    "Ledger",
    "OperandSpec",
    "Policy",
    "PrivacyEngine",
    "Recipe",
    "Scheduler",
    "Site",
    "SiteTable",
    "__version__",
    "check_batch_rule",
    "compile",
    "errors",
    "format_names",
    "init_process_group",
    "losses",
    "plan",
    "quantize",
    "recipe_names",
    "register_batch_rule",
    "register_format",
    "register_recipe",
    "replace_batch_norm",
    "sessions",
]
