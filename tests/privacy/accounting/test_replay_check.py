"""The releases beside a ledger: what is lost of one shows in the other, and no noise comes twice on another sum."""

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import dpquant_compile as dpq
from dpquant_compile.errors import LedgerError, PrivateTrainingError
from dpquant_compile.privacy.accounting import ledger_file
from dpquant_compile.privacy.accounting.ledger import Ledger
from dpquant_compile.privacy.accounting.replay_check import Releases, fingerprint
from tests.support.ledgers import counts, spent
from tests.support.private_loops import made, train
from tests.support.resuming import STEPS, engine_of, epoch, result_of, same

pytestmark = pytest.mark.slow  # each test trains several runs


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.json"


def beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.releases")


def spends(engine: dpq.PrivacyEngine) -> int:
    return sum(entry.steps for entry in engine.ledger.entries)


def leaving_out(engine: dpq.PrivacyEngine, left: Iterable[int]) -> None:
    """An epoch in which the logical batches of these numbers, from 1, are read, and no step follows."""
    made, number = engine.run, 0
    for x, y in made.loader:
        number += made.session.micro.first
        if number not in set(left):
            made.optimizer.zero_grad()
            made.criterion(made.session.model(x), y).backward()
            made.optimizer.step()


# A run that is interrupted, and resumed

Cut = Callable[[Path], Any]


def interrupted(folder: Path, life: Callable[[dpq.PrivacyEngine], Any] = epoch) -> dict[str, Any]:
    """An epoch, a checkpoint, and what follows in the rest of the first life; the result."""
    with engine_of(folder) as engine:
        epoch(engine)
        engine.save_checkpoint(path=folder / "c.pt")
        life(engine)
        return result_of(engine)


def resumed(folder: Path, replay: bool = True, lr: float = 0.2) -> dpq.PrivacyEngine:
    engine = engine_of(folder)
    engine.load_checkpoint(path=folder / "c.pt", replay=replay)
    engine.run.optimizer.original_optimizer.param_groups[0]["lr"] = lr
    return engine


def rolled_back(path: Path) -> None:
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-2]))


@pytest.mark.parametrize("lose", [Path.unlink, rolled_back], ids=["deleted", "rolled back"])
@pytest.mark.parametrize("lr", [0.2, 0.3], ids=["as it was", "another rate"])
def test_lost_releases_stop_a_run_that_repeats(path: Path, lose: Cut, lr: float) -> None:
    """Nobody can tell that it repeats, and with another rate it does not."""
    interrupted(path.parent)
    lose(beside(path))
    with resumed(path.parent, lr=lr) as engine:
        with pytest.raises(PrivateTrainingError, match="other values" if lr == 0.3 and lose is rolled_back else "lost"):
            epoch(engine)
        assert spends(engine) == 2 * STEPS
    with resumed(path.parent, replay=False, lr=lr) as engine:
        epoch(engine)
        assert spends(engine) == 3 * STEPS  # with new noise, and a charge of its own


def test_the_error_says_what_is_lost_and_how_to_go_on(path: Path) -> None:
    interrupted(path.parent)
    beside(path).unlink()
    with resumed(path.parent) as engine, pytest.raises(PrivateTrainingError) as raised:
        epoch(engine)
    for words in ("release 5 since it began, of 8 on record", str(beside(path)), "lost or rolled back", "replay=False"):
        assert words in str(raised.value)


def test_a_lost_file_is_not_taken_for_a_crash_before_the_first_release(path: Path) -> None:
    """One spend on record beyond the checkpoint, whose release was made."""

    def one_step(engine: dpq.PrivacyEngine) -> None:
        made = engine.run
        for x, y in made.loader:
            made.criterion(made.session.model(x), y).backward()
            made.optimizer.step()
            if made.session.micro.last:
                break

    interrupted(path.parent, one_step)
    beside(path).unlink()
    with resumed(path.parent, lr=0.3) as engine:
        assert spends(engine) == STEPS + 1
        with pytest.raises(PrivateTrainingError, match="lost or rolled back"):
            epoch(engine)


def test_lost_releases_do_not_stop_a_run_that_repeats_nothing(path: Path) -> None:
    """What follows the last spend on record was never released; and from there on the file is whole again."""
    (path.parent / "whole").mkdir()
    whole = interrupted(path.parent / "whole")
    interrupted(path.parent, lambda engine: None)
    beside(path).unlink()
    with resumed(path.parent) as engine:
        epoch(engine)
        assert same(result_of(engine), whole)
    with resumed(path.parent) as engine:
        epoch(engine)
        assert same(result_of(engine), whole) and spends(engine) == 2 * STEPS


@pytest.mark.parametrize("at", [1, 2, 4])
@pytest.mark.parametrize("epochs", [0, 1], ids=["new run", "later"])
def test_a_crash_between_payment_and_release_is_repeated(path: Path, tmp_path: Path, at: int, epochs: int) -> None:
    (tmp_path / "whole").mkdir()
    with engine_of(tmp_path / "whole") as whole:
        for _ in range(epochs + 1):
            epoch(whole)
    with engine_of(path.parent) as engine:
        for _ in range(epochs):
            epoch(engine)
        engine.save_checkpoint(path=path.parent / "c.pt")
        account, seen = engine.run.optimizer._account, []
        note = account.note

        def crash(values: Any) -> None:
            seen.append(1)
            if len(seen) == at:
                raise KeyboardInterrupt
            note(values)

        account.note = crash
        with pytest.raises(KeyboardInterrupt):
            epoch(engine)
        assert spends(engine) == epochs * STEPS + at
    for _ in range(2):  # and once more, when it is known
        with resumed(path.parent) as engine:
            epoch(engine)
            assert same(result_of(engine), result_of(whole))


def test_a_batch_that_was_left_out_is_left_out_again(path: Path) -> None:
    result = interrupted(path.parent, lambda engine: leaving_out(engine, [2, 4]))
    with resumed(path.parent) as engine:
        leaving_out(engine, [2, 4])
        assert same(result_of(engine), result) and spends(engine) == 2 * STEPS
        epoch(engine)
        assert spends(engine) == 3 * STEPS


def test_a_release_where_there_was_none_is_stopped(path: Path) -> None:
    interrupted(path.parent, lambda engine: leaving_out(engine, [2]))
    with resumed(path.parent) as engine, pytest.raises(PrivateTrainingError, match=r"spend 6 .* had no release then"):
        epoch(engine)


@pytest.mark.parametrize("left", [[2], [1, 2, 3, 4]], ids=["one", "all"])
def test_a_release_that_is_left_out_is_stopped(path: Path, left: list[int]) -> None:
    """The noise of that release would come on the next sum."""
    interrupted(path.parent)
    with resumed(path.parent) as engine:
        with pytest.raises(PrivateTrainingError, match=rf"release {STEPS + left[0]} .* left out now"):
            leaving_out(engine, left)
        with pytest.raises(PrivateTrainingError, match="left out now"):  # and it stays stopped
            epoch(engine)
        assert spends(engine) == 2 * STEPS


def test_a_spend_that_an_interrupt_leaves_alone_is_settled(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(path.parent)
    with resumed(path.parent) as engine:
        spend = engine.ledger.spend

        def interrupt(*args: Any, **kwargs: Any) -> None:
            spend(*args, **kwargs)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(engine.ledger, "spend", interrupt)
            with pytest.raises(KeyboardInterrupt):
                epoch(engine)
        with pytest.raises(PrivateTrainingError, match=rf"release {STEPS + 1} .* left out now"):
            epoch(engine)


def test_a_spend_that_was_refused_leaves_no_trace(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError("disk full")

    with engine_of(path.parent) as engine:
        epoch(engine)
        with monkeypatch.context() as patch:
            patch.setattr(engine.ledger, "spend", refuse)
            with pytest.raises(OSError, match="disk full"):
                epoch(engine)
        lines = beside(path).read_text()
        epoch(engine)
        assert "dropped" not in beside(path).read_text() and beside(path).read_text().startswith(lines)
    assert counts(Ledger.read(path)) == [("training", 2 * STEPS)]


def test_spends_by_hand_do_not_stop_a_resumed_run(path: Path) -> None:
    def life(engine: dpq.PrivacyEngine) -> None:
        engine.ledger.spend("statistics", q=1.0, sigma=5.0, steps=10)
        epoch(engine)

    result = interrupted(path.parent, life)
    with resumed(path.parent) as engine:
        life(engine)
        assert same(result_of(engine), result) and spends(engine) == 2 * STEPS + 10


def test_noise_that_nothing_pays_for_is_stopped() -> None:
    engine = engine_of()
    epoch(engine)
    with pytest.raises(PrivateTrainingError, match="no spend of the ledger pays for"):
        engine.release([next(iter(engine.run.session.parameters.values())).detach()])


def test_a_line_that_was_cut_counts_for_nothing(path: Path) -> None:
    lines = ["a 0 begun", "a 1 0123456789abcdef", "a 2 dropped", "a 2 world 12"]
    for line in lines:
        beside(path).write_text(f"a 0 begun\n{line}")
        releases = Releases(path)
        assert releases.counts == {"a": 0} and not releases.went_on_elsewhere("a", 0, 1)
        releases.note_begun("b", 0)
        again = Releases(path)
        assert again.counts == {"a": 0, "b": 0} and not again.went_on_elsewhere("a", 0, 1)
    beside(path).write_text("\n".join([*lines, ""]))
    assert Releases(path).counts == {"a": 2} and Releases(path).went_on_elsewhere("a", 2, 1)


# A ledger that is lost


def older(path: Path) -> None:
    """Put back the ledger of the checkpoint, with four of eight spends."""
    shutil.copy(path.with_name("kept.json"), path)


@pytest.mark.parametrize("lose", [Path.unlink, older], ids=["deleted", "rolled back"])
def test_a_lost_ledger_is_noticed(path: Path, lose: Cut) -> None:
    def life(engine: dpq.PrivacyEngine) -> None:
        shutil.copy(path, path.with_name("kept.json"))
        epoch(engine)

    interrupted(path.parent, life)
    run = json.loads(path.read_text())["runs"][0][1]
    lose(path)
    left = path.read_bytes() if path.exists() else None
    has = 0 if left is None else STEPS
    for opened in (
        lambda: Ledger("rdp", path),
        lambda: Ledger.read(path),
        lambda: dpq.PrivacyEngine(accountant="rdp", ledger_path=path),
    ):
        with pytest.raises(LedgerError, match=rf"8 of run {run}, of which it has {has}\..*backup.*by hand.*evidence"):
            opened()
        assert (path.read_bytes() if path.exists() else None) == left  # nothing begins from zero


def test_a_ledger_is_read_while_its_owner_goes_on(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_of(path.parent) as engine:
        decode = ledger_file._decode

        def slowly(at: Path) -> Any:
            found = decode(at)
            epoch(engine)  # whose spends and releases come after what was read
            return found

        epoch(engine)
        monkeypatch.setattr(ledger_file, "_decode", slowly)
        assert counts(Ledger.read(path)) == [("training", STEPS)] and spends(engine) == 2 * STEPS


def test_a_new_ledger_under_another_name_takes_what_is_missing(path: Path) -> None:
    interrupted(path.parent)
    path.unlink()
    ledger = Ledger("rdp", path.with_name("anew.json"))
    spent(ledger, steps=2 * STEPS)
    assert counts(Ledger.read(path.with_name("anew.json"))) == [("training", 2 * STEPS)]


def test_a_run_that_began_and_never_spent_is_no_loss(path: Path) -> None:
    releases = Releases(path)
    releases.note_begun("one", 0)
    ledger = Ledger("rdp", path)
    spent(ledger)
    ledger.close()
    releases.note_begun(ledger.position[0], 1)
    assert counts(Ledger.read(path)) == [("training", 1)]  # as many as are known
    Ledger("rdp", path).close()
    releases.note_begun(ledger.position[0], 2)
    with pytest.raises(LedgerError, match="rolled back"):
        Ledger("rdp", path)


def test_a_fingerprint_is_of_values_and_not_of_where_they_lie() -> None:
    x = torch.randn(1001, generator=torch.Generator().manual_seed(0))
    room = torch.cat([torch.zeros(3), x])
    assert fingerprint([room[3:]]) == fingerprint([x]) == fingerprint([x.clone()])
    assert fingerprint([x.view(7, 143).t()]) == fingerprint([x.view(7, 143).t().contiguous()])
    other = x.clone()
    other[500] = torch.nextafter(x[500], x[500] + 1)
    last = x.clone()
    last[-1] += 1
    found = {fingerprint(values) for values in ([x], [other], [last], [x, x[:3]], [x[:3], x], [])}
    assert len(found) == 6


def test_two_runs_with_one_seed_are_not_added_up(tmp_path: Path) -> None:
    """Their noise is the same: it would cancel in the difference of what they release."""
    with engine_of(tmp_path) as first:
        epoch(first)
    with engine_of(tmp_path) as second, pytest.raises(PrivateTrainingError, match=r"same noise.*secure_mode=True"):
        epoch(second)
    with engine_of(tmp_path, secure=True) as third:
        epoch(third)


def test_a_resumed_run_that_departs_is_stopped(tmp_path: Path) -> None:
    def trained(state: Any, rate: float, epochs: int, replay: bool = True) -> tuple[dpq.PrivacyEngine, Any]:
        run = made(engine=dpq.PrivacyEngine(accountant="rdp", ledger_path=tmp_path / "ledger"))
        saved = None
        with run.engine as engine:
            if state is not None:
                engine.load_state_dict(state, replay=replay)
            run.optimizer.param_groups[0]["lr"] = rate
            for _ in range(epochs):
                train(run)
                saved = saved or engine.state_dict()
        return engine, saved

    first, state = trained(None, 0.1, 2)
    steps = sum(e.steps for e in first.ledger.entries)
    again, _ = trained(state, 0.1, 1)
    assert sum(e.steps for e in again.ledger.entries) == steps  # the same releases: nothing new
    with pytest.raises(PrivateTrainingError, match=r"does not repeat.*replay=False"):
        trained(state, 0.5, 1)
    other, _ = trained(state, 0.5, 1, replay=False)
    assert sum(e.steps for e in other.ledger.entries) == steps + steps // 2
