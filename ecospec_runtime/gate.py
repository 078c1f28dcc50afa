"""Whether drafting pays at this point of a text: it stops when it has not paid for a while, and is tried again later.

State of one sequence, fed with what each draft costs (see `Outlook`) and with what the target then accepted of it: a drafter
that is sure of itself and wrong must not go on. No clock, so that replay decides as the engine does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

MEMORY = 0.9  # weight of what was known before in the running mean of gains
TRUST = 0.2  # tokens per step that drafting is given credit for at the start
LONGEST = 32  # plain steps between two tries


class Outlook(NamedTuple):
    """What a step's drafting promises: both in tokens, time at the price that the policy puts on it."""

    tokens: float  # draft tokens that are expected to be accepted
    cost: float  # time beyond that of a plain step: drafting, and a pass over more than the root

    @property
    def gain(self) -> float:
        """Tokens gained over a plain step."""
        return self.tokens - self.cost


class Gate(Protocol):
    """What one sequence remembers of its drafting. Per step: `passes`; if so `record`, and `verified` after the pass."""

    depth: int | None  # levels that the next step may draft; None: as many as configured

    def passes(self) -> bool:
        """Whether this step drafts; to be asked once per step."""
        ...

    def record(self, outlook: Outlook) -> None:
        """Take in what the step that just drafted promises."""
        ...

    def verified(self, accepted: int) -> None:
        """Take in how many draft tokens the target accepted in that step."""
        ...


@dataclass(kw_only=True)
class Resting:
    """The part of a gate that has drafting rest: each try that fails doubles the wait for the next."""

    wait: int = 0  # plain steps still to go
    length: int = 0  # of the last pause; 0: the last try paid

    def passes(self) -> bool:
        """See `Gate`."""
        if self.wait:
            self.wait -= 1
            return False
        return True

    def rest(self, first: int, most: int) -> None:
        """Begin a pause: of `first` plain steps, or twice the last one, up to `most`."""
        self.length = min(2 * self.length, most) if self.length else first
        self.wait = self.length


@dataclass
class DraftGate(Resting):
    """Shut while the running mean of what drafting gained is negative."""

    pause: int  # plain steps before the first try; 0: never shut
    mean: float = TRUST
    depth: int | None = None
    outlook: Outlook | None = None  # of the step under way

    def record(self, outlook: Outlook) -> None:
        """See `Gate`."""
        self.outlook = outlook

    def verified(self, accepted: int) -> None:
        """See `Gate`."""
        if self.outlook is None or not self.pause:
            return
        gained = accepted - self.outlook.cost
        self.mean = gained if self.length else MEMORY * self.mean + (1.0 - MEMORY) * gained
        if self.mean < 0.0:
            self.rest(self.pause, max(LONGEST, self.pause))
        else:
            self.length = 0
