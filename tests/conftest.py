"""One thread per worker: the tests run in as many processes as there are cores, and threads would fight over them.
Interrupts raise, as they do in a terminal: a shell that starts the tests in the background has them ignored.
Hypothesis sets no time limits: how long an example takes says how busy the machine is, and no more.
What is heavy is slow as well, so that `make check` leaves it out.
What is there before the first test stays to the end, so the garbage collector need not go through it.
Triton interprets its kernels: it is told before anything imports it. Tests that compile start a process of their own.
"""

import gc
import os
import signal

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

os.environ["TRITON_INTERPRET"] = "1"
signal.signal(signal.SIGINT, signal.default_int_handler)
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    import torch

    torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("heavy") is not None:
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
