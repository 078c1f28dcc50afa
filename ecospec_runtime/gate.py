"""Whether drafting pays at this point of a text: it stops when it has not paid for a while, and is tried again later.

State of one sequence, fed with what a step is expected to gain by its drafting (see `ThroughputPolicy.gain`); no clock, so
that replay decides as the engine does.
"""

from __future__ import annotations

from dataclasses import dataclass

MEMORY = 0.8  # weight of what was known before in the running mean of gains
TRUST = 0.2  # tokens per step that drafting is given credit for at the start
LONGEST = 32  # plain steps between two tries


@dataclass
class DraftGate:
    """Shut while the running mean of gains is negative; each try that fails doubles the wait for the next."""

    pause: int  # plain steps before the first try; 0: never shut
    mean: float = TRUST
    wait: int = 0  # plain steps still to go
    length: int = 0  # of the present pause; 0: open

    def passes(self) -> bool:
        """Whether this step drafts; to be asked once per step."""
        if self.wait:
            self.wait -= 1
            return False
        return True

    def record(self, gain: float) -> None:
        """Take in the gain of a step that drafted, in tokens."""
        self.mean = gain if self.length else MEMORY * self.mean + (1.0 - MEMORY) * gain
        if self.pause and self.mean < 0.0:
            self.length = min(2 * self.length, max(LONGEST, self.pause)) if self.length else self.pause
            self.wait = self.length
        else:
            self.length = 0
