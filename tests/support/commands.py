"""`dpquant` as users call it."""

import subprocess
import sys
from pathlib import Path


def dpquant(*words: str, cwd: Path, **options) -> subprocess.CompletedProcess[str]:
    """A process of its own, as users have it."""
    command = [sys.executable, "-m", "dpquant_compile.cli", *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=600, check=False, **options)
