"""Progress of a harvest in positions: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import lightning as L
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

SECONDS_BETWEEN_LINES = 10.0


class PositionProgress(L.Callback):
    """Shows `written()` of `total` positions after every prompt, on rank 0."""

    def __init__(self, total: int, written: Callable[[], int]) -> None:
        self._total, self._written = total, written
        self._bar: Progress | None = None
        self._task: Any = None
        self._start = self._last = 0.0

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin the bar, or the clock for plain lines."""
        self._start = self._last = time.monotonic()
        self._total = max(1, self._total // trainer.world_size)  # of this rank
        if sys.stdout.isatty() and trainer.is_global_zero:
            columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
            self._bar = Progress(TextColumn("harvest"), *columns)
            self._bar.start()
            self._task = self._bar.add_task("harvest", total=self._total, completed=self._written())

    def on_predict_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Advance to what has been recorded."""
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=self._written())
        elif trainer.is_global_zero and now - self._last >= SECONDS_BETWEEN_LINES:
            self._last = now
            print(
                f"harvest: {self._written():,} of at most {self._total:,} positions, {now - self._start:.0f} s",
                flush=True,
            )

    def on_exception(self, *_: Any) -> None:
        """Leave the terminal clean."""
        self._stop()

    def on_predict_end(self, *_: Any) -> None:
        """End the bar."""
        self._stop()

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
