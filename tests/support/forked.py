"""Run scripts, each in a process of its own that has torch and the library imported already.

The import takes longer than most scripts do. A server imports once, and forks for every script before any thread or
parallel region exists, so that nothing of one script is seen by another.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SERVER = """
import os, runpy, sys, traceback
import opacus, torch._dynamo, torch._inductor.compile_fx
import dpquant_compile

for line in sys.stdin:
    path = line.rstrip("\\n")
    child = os.fork()
    if child == 0:
        os.chdir(os.path.dirname(path))
        os.dup2(os.open("stdout", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        os.dup2(os.open("stderr", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        code = 1
        try:
            runpy.run_path(path, run_name="__main__")
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
os._exit(0)  # the end of the input; taking torch down in order takes seconds
"""


class Forks:
    """A server; `run` gives the exit code of a script, whose stdout and stderr are files beside it."""

    def __init__(self, server: "subprocess.Popen[str]") -> None:
        self._server = server

    def run(self, script: Path) -> int:
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(f"{script}\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline())


@contextmanager
def forks() -> Iterator[Forks]:
    """A server that ends with the block."""
    # Inductor's own worker processes would begin with the import, and a thread to talk to them.
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", SERVER], text=True, env=environment, **pipes) as server:
        yield Forks(server)
