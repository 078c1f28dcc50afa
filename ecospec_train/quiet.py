"""Whether a machine is quiet enough to time on: what other processes use of its processors.

Time that the machine's host takes for others (steal) counts as theirs.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field

import psutil

from ecospec_runtime.console import note
from ecospec_runtime.errors import UserError

SHARE = 0.15  # of the cores that others may use
FEWEST = 0.3  # cores that they may always use
SAMPLE = 1.0  # seconds of one look
PATIENCE = 30.0  # seconds to wait for others to finish


@dataclass
class OtherLoad:
    """Cores that other processes use, from when this object was made to when it is asked."""

    busy: float = field(default_factory=lambda: busy_seconds())
    own: float = field(default_factory=lambda: own_seconds())
    since: float = field(default_factory=time.monotonic)

    def cores(self) -> float:
        """Mean number of cores since then."""
        elapsed = max(time.monotonic() - self.since, 1e-3)
        return max(0.0, (busy_seconds() - self.busy - (own_seconds() - self.own)) / elapsed)


def busy_seconds() -> float:
    """Seconds that all processors together have been at work since the machine started."""
    times = psutil.cpu_times()
    inside = ("guest", "guest_nice")  # counted in user and nice already
    return float(sum(v for k, v in times._asdict().items() if k not in ("idle", "iowait", *inside)))


def own_seconds() -> float:
    """Seconds of them for this process."""
    times = os.times()
    return times.user + times.system


def is_busy(cores: float) -> bool:
    """Whether that much other work spoils a timing on this machine."""
    return cores > max(FEWEST, SHARE * (os.cpu_count() or 1))


def wait_until_quiet(remedy: str, patience: float | None = None) -> None:
    """Return once others leave the processors alone; UserError with `remedy` when they have not after `patience` seconds
    (None: `PATIENCE`)."""
    deadline = time.monotonic() + (PATIENCE if patience is None else patience)
    told = False
    while True:
        load = OtherLoad()
        time.sleep(SAMPLE)
        cores = load.cores()
        if not is_busy(cores):
            return
        if time.monotonic() >= deadline:
            raise UserError(
                f"other processes use {cores:.1f} of {os.cpu_count()} cores, so times would mean little; {remedy}"
            )
        if not told:
            note(f"waiting for other processes to finish: they use {cores:.1f} of {os.cpu_count()} cores")
            told = True
