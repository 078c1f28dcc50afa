"""Workers that share a study, one of them killed: nothing lost, nothing done twice, on every kind of storage."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from ecospec_runtime.errors import UserError
from ecospec_train import storage as storage_module
from ecospec_train import workers
from ecospec_train.storage import open_storage, shown
from ecospec_train.workers import Work, finished, key_of

POINTS = [{"x": float(i)} for i in range(3)]
TOTAL = 8
PATIENCE_S = 120  # for a busy machine; nothing here waits so long by itself


def make(where: str, total: int = TOTAL) -> Work:
    """A worker on the study `s` of a storage."""
    storage = open_storage(where)
    study = optuna.create_study(storage=storage, study_name="s", direction="maximize", load_if_exists=True)
    return Work(study, storage, POINTS, total)


def square(trial: optuna.Trial) -> float:
    return -(trial.suggest_float("x", -10, 10) ** 2)


def check(work: Work, total: int = TOTAL) -> None:
    """Every piece is finished exactly once."""
    done = work.study.get_trials(states=(TrialState.COMPLETE,))
    assert len(done) == len(finished(work.study)) == total
    keys = [key_of(trial) for trial in done]
    assert len(set(keys)) == total
    assert {key: trial.params for key, trial in zip(keys, done, strict=True) if key.startswith("fixed")} == {
        f"fixed {i}": point for i, point in enumerate(POINTS)
    }
    assert not work.study.get_trials(states=(TrialState.RUNNING, TrialState.WAITING))


@pytest.fixture
def journal(tmp_path: Path) -> str:
    return str(tmp_path / "study.journal")


SCRIPT = """
import sys, time
from pathlib import Path
from tests.train.test_workers import make, square

where, hang = sys.argv[1:]
def objective(trial):
    value = square(trial)
    if hang and trial.number > 0:
        Path(hang).touch()
        time.sleep(3600)
    return value
make(where).run(objective)
"""


def start(where: str, hang: Path | None = None) -> subprocess.Popen[bytes]:
    """A worker in a process of its own; with `hang` it stops in its second trial and makes that file."""
    arguments = [sys.executable, "-c", SCRIPT, where, str(hang or "")]
    root = Path(__file__).parents[2]
    path = os.pathsep.join(filter(None, (str(root), str(root / "kernels"), os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(arguments, cwd=root, env=os.environ | {"PYTHONPATH": path})


def appears(path: Path) -> None:
    """Wait for a file."""
    deadline = time.monotonic() + PATIENCE_S
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def kill_one_of_three(where: str, tmp_path: Path) -> None:
    """The first worker hangs and is killed while two others work; they finish what it had begun."""
    victim = start(where, tmp_path / "hangs")
    others: list[subprocess.Popen[bytes]] = []
    try:
        appears(tmp_path / "hangs")
        others = [start(where), start(where)]
        time.sleep(0.5)
        victim.send_signal(signal.SIGKILL)
        assert victim.wait(PATIENCE_S) == -signal.SIGKILL
        assert [other.wait(PATIENCE_S) for other in others] == [0, 0]
    finally:
        for process in (victim, *others):
            process.kill()
            process.wait()
    work = make(where)
    check(work)
    left = [t for t in work.study.trials if t.state == TrialState.FAIL and "surplus" not in t.user_attrs]
    assert [t.user_attrs["owner"]["pid"] for t in left] == [victim.pid]
    again = [t for t in work.study.trials if t.state == TrialState.COMPLETE and key_of(t) == key_of(left[0])]
    assert [t.params for t in again] == [left[0].params]


@pytest.mark.parametrize("form", ["{}/study.journal", "sqlite:///{}/study.db"])
def test_a_killed_worker_loses_nothing(form: str, tmp_path: Path) -> None:
    kill_one_of_three(form.format(tmp_path), tmp_path)


def binary(name: str) -> str | None:
    """A program of PostgreSQL; Debian keeps them out of PATH."""
    places = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), reverse=True)
    return str(places[0]) if places else shutil.which(name)


@pytest.fixture
def postgres() -> Iterator[str]:
    """URL of a database of our own: a throw-away server that listens on a socket in a temporary folder."""
    pytest.importorskip("psycopg", reason="needs the extra `postgres`")
    initdb, server = binary("initdb"), binary("postgres")
    if initdb is None or server is None:
        pytest.skip("no PostgreSQL server here; on Debian: apt-get install postgresql")
    user = {"user": "postgres"} if os.getuid() == 0 else {}  # the server refuses to be root
    folder = Path(tempfile.mkdtemp(prefix="pg"))  # a socket's path must be short
    process = None
    try:
        if user:
            shutil.chown(folder, "postgres")
        data = folder / "data"
        subprocess.run(
            [initdb, "-D", data, "-U", "worker", "-A", "trust", "-N"], check=True, capture_output=True, **user
        )  # type: ignore[call-overload]
        process = subprocess.Popen([server, "-D", data, "-k", folder, "-c", "listen_addresses=", "-F"],
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **user)  # type: ignore[call-overload]  # fmt: skip
        appears(folder / ".s.PGSQL.5432")
        yield f"postgresql://worker@/postgres?host={folder}"
    finally:
        if process is not None:
            process.send_signal(signal.SIGINT)
            process.wait(PATIENCE_S)
        shutil.rmtree(folder, ignore_errors=True)


def test_a_killed_worker_loses_nothing_in_postgresql(postgres: str, tmp_path: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:  # the socket is there a moment before the server answers
        try:
            open_storage(postgres)
            break
        except UserError:
            assert time.monotonic() < deadline
            time.sleep(0.2)
    kill_one_of_three(postgres, tmp_path)


def test_workers_that_queue_the_same_points_do_them_once(journal: str) -> None:
    work = make(journal)
    for _ in range(2):
        for i, point in enumerate(POINTS):
            work.study.enqueue_trial(point, user_attrs={"key": f"fixed {i}"})
    calls: list[int] = []
    work.run(lambda trial: calls.append(trial.number) or square(trial))  # type: ignore[func-returns-value]
    check(work)
    assert len(calls) == TOTAL


def test_a_study_is_continued_to_the_new_total(journal: str) -> None:
    make(journal).run(square)
    make(journal).run(lambda trial: pytest.fail("nothing was left to do"))
    work = make(journal, TOTAL + 2)
    work.run(square)
    check(work, TOTAL + 2)


def stranger(work: Work, **owner: Any) -> int:
    """A running trial of another worker; returns its number."""
    trial = work.study.ask()
    if owner:
        trial.set_user_attr("owner", workers.me() | owner)
    return trial.number


@pytest.mark.parametrize("owner", [{"host": "elsewhere/1"}, {}], ids=["another machine", "nobody said who"])
def test_silence_counts_as_death(journal: str, owner: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A journal file has no heartbeats, and a worker may die before it says who it is."""
    work = make(journal)
    number = stranger(work, **owner)
    work.fail_dead()
    assert work.study.trials[number].state == TrialState.RUNNING
    monkeypatch.setattr(storage_module, "GRACE_S", 0.0)
    work.run(square)
    assert work.study.trials[number].state == TrialState.FAIL
    check(work)


def test_beats_are_a_sign_of_life(journal: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_module, "GRACE_S", 0.0)
    monkeypatch.setattr(storage_module, "BEAT_S", 0.01)
    mine, other = make(journal), make(journal)
    trial = other.study.ask()
    trial.set_user_attr("owner", workers.me() | {"host": "elsewhere/1"})
    with workers.Beat(other.storage, trial):
        for _ in range(3):
            mine.fail_dead()
            seen = workers.frozen(mine.study, trial.number).user_attrs.get("beat", -1)  # it has seen no later one
            deadline = time.monotonic() + PATIENCE_S
            while workers.frozen(mine.study, trial.number).user_attrs.get("beat", -1) <= seen:
                assert time.monotonic() < deadline
    assert mine.study.trials[trial.number].state == TrialState.RUNNING
    mine.fail_dead()
    mine.fail_dead()
    assert mine.study.trials[trial.number].state == TrialState.FAIL


def test_a_process_number_in_use_again_is_another_process(journal: str) -> None:
    work = make(journal)
    reused, alive = stranger(work, started=1.0), stranger(work, started=workers.me()["started"])
    work.fail_dead()
    assert [work.study.trials[n].state for n in (reused, alive)] == [TrialState.FAIL, TrialState.RUNNING]


@pytest.mark.parametrize("form", ["{}/study.journal", "sqlite:///{}/study.db"])
def test_a_worker_taken_for_dead_does_not_count_twice(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow, quick = make(form.format(tmp_path)), make(form.format(tmp_path))

    def slept(trial: optuna.Trial) -> float:
        if trial.number == 1:
            quick.study.tell(trial.number, state=TrialState.FAIL)
            quick.run(square)
        return square(trial)

    slow.run(slept)
    check(quick)
    assert capsys.readouterr().err.count("given to another worker") == 1


def failing(error: type[BaseException]) -> Callable[[optuna.Trial], float]:
    def objective(trial: optuna.Trial) -> float:
        if square(trial) == -1.0:
            raise error
        return square(trial)

    return objective


def test_an_interrupted_trial_is_tried_again_however_often(journal: str) -> None:
    for _ in range(workers.MAX_TRIES + 1):
        with pytest.raises(KeyboardInterrupt):
            make(journal).run(failing(KeyboardInterrupt))
    work = make(journal)
    work.run(square)
    check(work)


def test_a_point_that_ends_its_workers_is_given_up(journal: str, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(workers.MAX_TRIES):
        with pytest.raises(ZeroDivisionError):
            make(journal).run(failing(ZeroDivisionError))
    work = make(journal)
    work.run(failing(ZeroDivisionError))
    assert len(finished(work.study)) == TOTAL - 1
    assert capsys.readouterr().err.count("which is left out") == 1


def test_a_surplus_trial_whose_worker_died_is_not_owed(journal: str) -> None:
    """It was drawn when enough were at work, and its worker had no time to see that."""
    work = make(journal)
    work.run(square)
    number = stranger(work, started=1.0)
    work.run(square)
    assert work.study.trials[number].state == TrialState.FAIL
    check(work)


def test_storages_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "damaged.db").write_bytes(b"no database " * 99)
    (tmp_path / "damaged.journal").write_text("no journal\n\n")
    for where, words in (
        ("study.txt", r"ends in \.journal"),
        (f"{tmp_path}/none/a.journal", "no such folder"),
        (f"sqlite:///{tmp_path}/damaged.db", "cannot be opened"),
        (f"{tmp_path}/damaged.journal", "cannot be opened"),
        ("nonsense://a", "cannot be opened"),
    ):
        with pytest.raises(UserError, match=words) as caught:
            open_storage(where)
        assert "\n" not in str(caught.value)
    assert "secret" not in shown("postgresql://me:secret@host/db")
