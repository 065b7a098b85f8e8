"""dpquant_compile: a compiler for private low-precision training in PyTorch."""

from dpquant_compile import errors
from dpquant_compile.api import compile
from dpquant_compile.batchnorm import replace_batch_norm
from dpquant_compile.module import CompiledModule
from dpquant_compile.numerics.formats import Format, format_names, get_format, register_format
from dpquant_compile.numerics.packing import decode, encode, pack4, unpack4
from dpquant_compile.numerics.quantize import quantize
from dpquant_compile.perf.speedup import Accelerator, Speedup, StageTimes, TotalTimes, estimate_speedup
from dpquant_compile.perf.stages import measure_stages
from dpquant_compile.policy import Policy
from dpquant_compile.privacy.accounting.ledger import Ledger
from dpquant_compile.privacy.accounting.planning import plan
from dpquant_compile.privacy.distributed.world import init_process_group
from dpquant_compile.privacy.engine import PrivacyEngine
from dpquant_compile.privacy.schedule.scheduler import Scheduler
from dpquant_compile.sites import Site, SiteTable
from dpquant_compile.torch_compile import Session, sessions

__version__ = "0.1.0"

__all__ = [
    "Accelerator",
    "CompiledModule",
    "Format",
    "Ledger",
    "Policy",
    "PrivacyEngine",
    "Scheduler",
    "Session",
    "Site",
    "SiteTable",
    "Speedup",
    "StageTimes",
    "TotalTimes",
    "__version__",
    "compile",
    "decode",
    "encode",
    "errors",
    "estimate_speedup",
    "format_names",
    "get_format",
    "init_process_group",
    "measure_stages",
    "pack4",
    "plan",
    "quantize",
    "register_format",
    "replace_batch_norm",
    "sessions",
    "unpack4",
]
