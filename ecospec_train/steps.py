"""Progress of a counted loop: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ecospec_runtime.console import leads

SECONDS_BETWEEN_LINES = 10.0


class Steps:
    """Context manager over `total` steps; `advance` after each, with a word on how it stands."""

    def __init__(self, label: str, total: int, done: int = 0):
        self.label, self.total, self.done = label, total, done
        self._start = self._last = time.monotonic()
        self._bar: Progress | None = None
        if sys.stderr.isatty() and leads():
            columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
            self._bar = Progress(TextColumn("{task.description}"), *columns, console=Console(stderr=True))
            self._task = self._bar.add_task(label, total=total, completed=done)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, status: str = "", done: int | None = None) -> None:
        """One step more is done, or `done` in all where others work on it too."""
        self.done = self.done + 1 if done is None else done
        if not leads():
            return
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done, description=f"{self.label} {status}".rstrip())
        elif time.monotonic() - self._last >= SECONDS_BETWEEN_LINES:
            self._last = time.monotonic()
            taken = self._last - self._start
            print(
                f"{self.label}: {self.done}/{self.total}, {taken:.0f} s {status}".rstrip(), file=sys.stderr, flush=True
            )
