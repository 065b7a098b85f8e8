"""progress: the line that says what is compiled, on a terminal, in a file, and in the log."""

import io
import logging
import sys
import time

import pytest

from dpquant_compile import progress as module
from dpquant_compile.progress import progress


class Terminal(io.StringIO):
    """Standard error of a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_EVERY", 0.01)
    monkeypatch.delenv("DPQUANT_PROGRESS", raising=False)


def compile_two_parts() -> None:
    with progress("net", "forward", "backward") as begin_part:
        for _ in range(2):
            begin_part()
            time.sleep(0.1)


def test_a_terminal_shows_the_line_and_erases_it(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sys, "__stderr__", terminal)
    compile_two_parts()
    text = terminal.getvalue()
    assert "\rdpquant: compiling net, 1 of 2 (forward), 0 s\x1b[K" in text and "2 of 2 (backward)" in text
    assert text.endswith("\r\x1b[K") and "\n" not in text


def test_above_a_bar_each_part_has_one_whole_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())  # sys.__stderr__ is another file: something took it over
    compile_two_parts()
    text = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert text.splitlines() == [
        f"dpquant: compiling net, {part}, 0 s" for part in ("1 of 2 (forward)", "2 of 2 (backward)")
    ]


def test_a_file_shows_nothing_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for asked, lines in ((None, 0), ("0", 0), ("1", 2)):
        if asked is not None:
            monkeypatch.setenv("DPQUANT_PROGRESS", asked)
        monkeypatch.setattr(sys, "stderr", io.StringIO())
        compile_two_parts()
        assert len(sys.stderr.getvalue().splitlines()) == lines  # type: ignore[attr-defined]


def test_nothing_is_shown_of_what_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_EVERY", 60.0)
    monkeypatch.setattr(sys, "stderr", Terminal())
    begun = time.perf_counter()
    compile_two_parts()
    assert not sys.stderr.getvalue() and time.perf_counter() - begun < 30  # type: ignore[attr-defined]


def test_a_compilation_within_another_shows_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPQUANT_PROGRESS", "1")
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with progress("outer"), progress("inner"):
        time.sleep(0.1)
    assert sys.stderr.getvalue() == "dpquant: compiling outer, 0 s\n"  # type: ignore[attr-defined]


def test_the_log_gets_the_seconds_and_an_error_ends_the_line(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        with progress("net", "forward", "backward") as begin_part:
            begin_part()
            raise RuntimeError

    with caplog.at_level(logging.INFO, logger="dpquant_compile"), pytest.raises(RuntimeError):
        fail()
    assert [record.getMessage() for record in caplog.records] == ["compiled net, forward: 0.0 s"]
    assert module._ONE.acquire(blocking=False)
    module._ONE.release()
