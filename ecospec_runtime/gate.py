"""Whether drafting pays at this point of a text: it stops when it has lost more than it may, and is tried again later.

What an engine remembers at one sampling temperature, over all its texts. Fed with what each draft costs (see `Outlook`) and with
what the target then accepted of it: a drafter that is sure of itself and wrong must not go on. No clock, so that replay decides
as the engine does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

LOSS_SHARE = 0.008  # tokens that tries may lose per plain step around them: with the first try, 1 % of some 3,000 steps
TRUST = 8.0  # credit of a try, in tokens: chance takes this from drafting that gains an eighth in one try of twenty
CHANCE = 40.0  # most credit, in mean squares of a step's gain: texts differ by more than steps do ...
MOST = 48.0  # ... and in tokens
MEMORY = 0.9  # weight of what was known before in the mean square


class Outlook(NamedTuple):
    """What a step's drafting promises: both in tokens, time at the rate of plain decoding, which a rest would give."""

    tokens: float  # draft tokens that are expected to be accepted
    cost: float  # time beyond that of a plain step: drafting, and a pass over more than the root

    @property
    def gain(self) -> float:
        """Tokens gained over a plain step."""
        return self.tokens - self.cost


class Gate(Protocol):
    """What is remembered of drafting. Per step: `passes`; if so `record`, and `verified` after the pass.

    Sequences that are decoded by turns may share one, since a step is over before the next begins. A step that drafts and is
    not `verified`, because it failed, leaves no trace.
    """

    depth: int | None  # levels that the next step may draft; None: as many as configured
    wait: int  # plain steps still to go before the next that drafts

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
    """What gates have in common: plain steps to wait for, and the step under way."""

    wait: int = 0  # plain steps still to go
    outlook: Outlook | None = None  # of the step under way

    def passes(self) -> bool:
        """See `Gate`."""
        if self.wait:
            self.wait -= 1
            return False
        return True

    def record(self, outlook: Outlook) -> None:
        """See `Gate`."""
        self.outlook = outlook


def repaying(loss: float) -> int:
    """Plain steps of which `loss` tokens are the share `LOSS_SHARE`."""
    return math.ceil(loss / LOSS_SHARE)


@dataclass
class DraftGate(Resting):
    """Drafting has a credit, in tokens: what drafts gain is put by, what they lose is taken off.

    Once it is overdrawn, drafting rests until what a try has lost is `LOSS_SHARE` of the plain steps since, and is tried again. So in
    no stretch of text, whatever is accepted, does it lose more than its credit, that share of the plain steps, and a step's loss.

    Credit is bounded, so that what other text has gained does not pay for long (the CUSUM test of Page, Biometrika 41, 1954).
    Chance alone uses up a credit c with probability exp(-2cm/v) where a step gains m with variance v: the bound goes with v.
    """

    pause: int  # fewest plain steps of a rest; 0: none, drafting never stops
    credit: float = TRUST
    square: float = 1.0  # running mean of squared gains
    depth: int | None = None

    def verified(self, accepted: int) -> None:
        """See `Gate`."""
        if self.outlook is None or not self.pause:
            return
        gained = accepted - self.outlook.cost
        self.square = MEMORY * self.square + (1.0 - MEMORY) * gained * gained
        self.credit = min(self.credit + gained, max(CHANCE * self.square, TRUST), MOST)
        if self.credit < 0.0:
            self.wait = max(self.pause, repaying(TRUST - self.credit))
            self.credit = TRUST
