"""Many workers on one study: every piece of work is done once, whoever dies on the way.

A piece of work is a point that is always tried, or one that the sampler draws; its trials carry its key. Any worker may see
a piece whose worker has died and queue it again; if two do, the trial that was created later is surplus and ends before it
begins. So the number of finished trials is exact without a lock that outlives its holder, on every kind of storage.

A dead worker is known by its process on the same machine, and elsewhere by its silence: databases keep heartbeats (Optuna's
own), a journal file does not, so there a trial counts beats itself and the others watch whether the count still moves.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

import optuna
import psutil
from optuna.exceptions import ExperimentalWarning, UpdateFinishedTrialError
from optuna.storages import BaseStorage, RDBStorage
from optuna.trial import FrozenTrial, TrialState

from ecospec_runtime.console import note
from ecospec_runtime.errors import first_line
from ecospec_train import storage as settings

DONE = (TrialState.COMPLETE, TrialState.PRUNED)
MAX_TRIES = 3  # workers that may die of one point before it is given up
POLL_S = 0.5
SAME_START_S = 5.0  # clocks may be set while a process runs; its number does not come back so soon

Point = dict[str, Any]
Objective = Callable[[optuna.Trial], float | tuple[float, float]]
After = Callable[[FrozenTrial, int], None]  # a finished trial of this worker, and how many are finished in all


def me() -> dict[str, Any]:
    """This process, among all machines that may share a storage; containers count as machines."""
    try:
        space = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        space = 0
    own = psutil.Process()
    return {"host": f"{socket.gethostname()}/{space}", "pid": own.pid, "started": own.create_time()}


def is_dead(owner: dict[str, Any]) -> bool:
    """Whether a process of this machine is gone; its number may be in use again."""
    try:
        process = psutil.Process(owner["pid"])
        gone = process.status() == psutil.STATUS_ZOMBIE
        return gone or abs(process.create_time() - owner["started"]) > SAME_START_S
    except psutil.NoSuchProcess:
        return True
    except psutil.AccessDenied:
        return False


def key_of(trial: FrozenTrial) -> str:
    """The piece of work that a trial belongs to."""
    return str(trial.user_attrs.get("key", f"sampled {trial.number}"))


def is_fixed(trial: FrozenTrial | optuna.Trial) -> bool:
    """Whether a trial is one of the points that are always tried."""
    return str(trial.user_attrs.get("key", "")).startswith("fixed ")


def finished(study: optuna.Study) -> list[FrozenTrial]:
    """One finished trial for every piece of work, in the order they were created."""
    kept: dict[str, FrozenTrial] = {}
    for trial in study.get_trials(deepcopy=False, states=DONE):
        kept.setdefault(key_of(trial), trial)
    return list(kept.values())


@dataclass
class Work:
    """The common work of a study: `points` that are always tried, and sampled ones up to `total` pieces in all."""

    study: optuna.Study
    storage: BaseStorage
    points: Sequence[Point]
    total: int
    _seen: dict[int, tuple[str, float]] = field(default_factory=dict)  # trial -> last sign of life, and since when
    _given_up: set[str] = field(default_factory=set)

    def run(self, objective: Objective, after: After = lambda trial, done: None) -> None:
        """Work until everything is finished, by this worker or another.

        What `objective` raises ends this worker; its trial is tried again by whoever comes next.
        """
        while True:
            self.fail_dead()
            trials = self.needed()
            for key, point in self.owed(trials):
                self.study.enqueue_trial(point, user_attrs={"key": key})
            states = {trial.state for trial in self.needed()}
            if TrialState.WAITING in states or self.sampled(trials) < self.to_sample:
                self.run_one(objective, after)
            elif TrialState.RUNNING in states:  # with another worker, which may die
                time.sleep(POLL_S)
            else:
                return

    @property
    def to_sample(self) -> int:
        """How many pieces the sampler draws."""
        return self.total - len(self.points)

    def needed(self) -> list[FrozenTrial]:
        """All trials but surplus ones."""
        return [t for t in self.study.get_trials(deepcopy=False) if "surplus" not in t.user_attrs]

    def sampled(self, trials: Sequence[FrozenTrial], below: int | None = None) -> int:
        """How many sampled pieces there are, whatever became of them; `below` a trial number."""
        return sum("key" not in t.user_attrs and (below is None or t.number < below) for t in trials)

    def owed(self, trials: Sequence[FrozenTrial]) -> list[tuple[str, Point]]:
        """Pieces that no trial is at, has done or waits for, unless they were given up: key and parameters."""
        alive = {key_of(t) for t in trials if t.state != TrialState.FAIL}
        lost: dict[str, list[FrozenTrial]] = {}
        for trial in trials:
            if trial.state == TrialState.FAIL:
                lost.setdefault(key_of(trial), []).append(trial)
        pieces = {f"fixed {i}": point for i, point in enumerate(self.points)}
        for key, failed in lost.items():
            first = failed[0]
            if "key" not in first.user_attrs and self.sampled(trials, below=first.number) >= self.to_sample:
                continue  # its worker died before it could see that enough were sampled
            pieces.setdefault(key, first.system_attrs.get("fixed_params") or first.params)
            if key not in alive and sum("interrupted" not in t.user_attrs for t in failed) >= MAX_TRIES:
                self.give_up(key, pieces[key])
        return [(key, point) for key, point in pieces.items() if key not in alive and key not in self._given_up]

    def give_up(self, key: str, point: Point) -> None:
        """Say once that a point is left out."""
        if key not in self._given_up:
            self._given_up.add(key)
            note(f"tune: warning: {MAX_TRIES} workers ended at {point}, which is left out")

    def surplus(self, trial: FrozenTrial) -> bool:
        """Whether an older trial does this one's piece, or enough pieces were sampled before it."""
        trials = self.needed()
        if "key" not in trial.user_attrs:
            return self.sampled(trials, below=trial.number) >= self.to_sample
        key = key_of(trial)
        return any(t.number < trial.number and key_of(t) == key and t.state != TrialState.FAIL for t in trials)

    def run_one(self, objective: Objective, after: After) -> None:
        """Take one trial and finish it, or find that it is surplus."""
        with warnings.catch_warnings():  # heartbeats are meant for Optuna's own loop, which cannot let go of a trial
            warnings.simplefilter("ignore")
            trial = self.study.ask()
        try:
            trial.set_user_attr("owner", me())
            if self.surplus(frozen(self.study, trial.number)):
                trial.set_user_attr("surplus", True)
                self.tell(trial, state=TrialState.FAIL)
                return
            with Beat(self.storage, trial):
                told = self.attempt(trial, objective)
        except UpdateFinishedTrialError:
            told = False
        if not told or frozen(self.study, trial.number).state not in DONE:
            note(f"tune: trial {trial.number} was given to another worker, since this one had not been heard of")
            return
        after(frozen(self.study, trial.number), len(finished(self.study)))

    def attempt(self, trial: optuna.Trial, objective: Objective) -> bool:
        """Run the objective and store what comes of it."""
        try:
            values = objective(trial)
        except optuna.TrialPruned:
            return self.tell(trial, state=TrialState.PRUNED)
        except UpdateFinishedTrialError:
            return False
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):  # the point is not to blame
                with suppress(UpdateFinishedTrialError):
                    trial.set_user_attr("interrupted", True)
            self.tell(trial, state=TrialState.FAIL)
            raise
        return self.tell(trial, values)

    def tell(
        self, trial: optuna.Trial | int, values: float | tuple[float, float] | None = None,
        state: TrialState | None = None,
    ) -> bool:  # fmt: skip
        """Finish a trial; False if another worker has just done so."""
        try:
            self.study.tell(trial, values, state, skip_if_finished=True)
        except UpdateFinishedTrialError:
            return False
        return True

    def fail_dead(self) -> None:
        """Mark the running trials of dead workers as failed, which makes their pieces owed."""
        beats = has_heartbeats(self.storage)
        if beats:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ExperimentalWarning)
                optuna.storages.fail_stale_trials(self.study)
        host = me()["host"]
        for trial in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            owner = trial.user_attrs.get("owner")
            if owner is not None and owner["host"] == host:
                dead = is_dead(owner)
            else:
                dead = (owner is None or not beats) and self.silent(trial)
            if dead:
                self.tell(trial.number, state=TrialState.FAIL)

    def silent(self, trial: FrozenTrial) -> bool:
        """Whether nothing of a trial has moved for `GRACE_S` by this worker's own clock."""
        sign = json.dumps([trial.user_attrs.get("owner"), trial.user_attrs.get("beat"), len(trial.params)])
        before, since = self._seen.get(trial.number, ("", 0.0))
        if sign != before:
            self._seen[trial.number] = sign, time.monotonic()
            return False
        return time.monotonic() - since > settings.GRACE_S


def frozen(study: optuna.Study, number: int) -> FrozenTrial:
    """A trial as the storage has it now."""
    return next(trial for trial in study.get_trials(deepcopy=False) if trial.number == number)


def has_heartbeats(storage: BaseStorage) -> bool:
    """Whether Optuna itself keeps heartbeats there."""
    return isinstance(storage, RDBStorage) and storage.get_heartbeat_interval() is not None


class Beat:
    """Context manager: a thread that tells the storage every `BEAT_S` that a trial is still running."""

    def __init__(self, storage: BaseStorage, trial: optuna.Trial):
        self._storage, self._trial = storage, trial
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        memory = isinstance(self._storage, RDBStorage) and not has_heartbeats(self._storage)
        if not memory:  # a database in memory belongs to one thread
            self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        count = 0
        while True:
            try:
                if isinstance(self._storage, RDBStorage):
                    self._storage.record_heartbeat(self._trial._trial_id)
                else:
                    self._trial.set_user_attr("beat", count)
                count += 1
            except UpdateFinishedTrialError:  # by another worker
                return
            except Exception as error:  # a storage out of reach for a moment
                note(f"tune: warning: no heartbeat stored ({first_line(error)})")
            if self._stop.wait(settings.BEAT_S):
                return
