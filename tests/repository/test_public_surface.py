"""The names that users type: these, and no others, are at the top of the package."""

import subprocess
import sys
from types import ModuleType

import dpquant_compile as dpq

SURFACE = {
    *("check_batch_rule", "compile", "CompiledModule", "Site", "SiteTable", "Policy", "replace_batch_norm", "sessions"),
    *("PrivacyEngine", "Scheduler", "Ledger", "plan", "init_process_group"),
    *("quantize", "Format", "register_batch_rule", "register_format", "format_names"),
    *("OperandSpec", "Recipe", "register_recipe", "recipe_names"),
    *("losses", "errors", "__version__"),
}


def test_all_is_the_surface() -> None:
    assert set(dpq.__all__) == SURFACE and len(dpq.__all__) == len(SURFACE)


def test_the_package_holds_its_submodules_and_nothing_else() -> None:
    held = {name for name in dir(dpq) if not name.startswith("_") and not isinstance(getattr(dpq, name), ModuleType)}
    assert held == SURFACE - {"losses", "errors", "__version__"}


def test_packing_timing_and_experiments_are_imported_by_those_who_use_them() -> None:
    code = "import sys, dpquant_compile; print(*(n for n in sys.modules if n.startswith('dpquant_compile.')))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    unwanted = ("numerics.packing", "perf", "lab", "cli.main", "integrations")
    assert [name for name in loaded if name.removeprefix("dpquant_compile.").startswith(unwanted)] == []
