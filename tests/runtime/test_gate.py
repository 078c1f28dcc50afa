"""When drafting rests, for how long, and what it can lose."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecospec_runtime.gate import CHANCE, LOSS_SHARE, MOST, TRUST, DraftGate, Outlook

GAINS = st.lists(st.floats(-2, 2), min_size=1, max_size=60)


class Step(NamedTuple):
    """One step of a decode."""

    credit: float  # before it
    gain: float  # in tokens; 0 for a plain step
    drafted: bool


def decode(gate: DraftGate, gains: list[float], steps: int) -> list[Step]:
    """Steps whose drafts always promise much; each takes the next gain, the last one for ever."""
    found: list[Step] = []
    tries = iter(gains)
    gain = 0.0
    for _ in range(steps):
        credit, drafts = gate.credit, gate.passes()
        if drafts:
            gain = next(tries, gain)
            gate.record(Outlook(9.0, 5.0 - gain))
            gate.verified(5)
        found.append(Step(credit, gain if drafts else 0.0, drafts))
    return found


def drafted(gate: DraftGate, gains: list[float], steps: int) -> list[int]:
    """Which steps draft."""
    return [i for i, step in enumerate(decode(gate, gains, steps)) if step.drafted]


def test_a_debt_is_a_share_of_the_plain_steps_that_follow() -> None:
    """Losses of 0.75 use up the credit of 8 in eleven steps, which lose 8.25: 1032 steps of rest, or more at once."""
    assert drafted(DraftGate(4), [-0.75], 2100) == [*range(11), *range(1043, 1054), *range(2086, 2097)]
    assert drafted(DraftGate(4, credit=0.0), [0.5, -0.25, -0.5, 1.0], 1200) == [0, 1, 2, *range(3 + 1032, 1200)]
    assert drafted(DraftGate(1100, credit=0.0), [-0.25, 1.0], 1300) == [0, *range(1101, 1300)], (
        "rests are `pause` at least"
    )


def test_a_few_bad_steps_do_not_shut_what_has_paid() -> None:
    assert drafted(DraftGate(4), [0.5] * 10 + [-0.5] * 4 + [0.5], 40) == list(range(40))


@pytest.mark.parametrize(("gain", "most"), [(0.1, TRUST / 0.1 + 2), (1.0, CHANCE + 1), (4.0, MOST / 4.0 + 1)])
def test_what_was_gained_pays_for_so_many_steps_only(gain: float, most: float) -> None:
    steps = decode(DraftGate(4), [gain] * 500 + [-gain], 600)
    assert 1 < next(i for i, step in enumerate(steps) if not step.drafted) - 500 <= most


@given(st.integers(1, 50), GAINS)
def test_no_stretch_loses_more_than_credit_a_share_and_one_step(pause: int, gains: list[float]) -> None:
    """From any step to any later one; and over the whole text no more than the first credit, whatever was gained between."""
    steps = decode(DraftGate(pause), gains, 1500)
    worst = max(0.0, -min(gains))
    total, reserve = 0.0, float("inf")  # gains so far with the share; least (credit - total) at any start of a stretch
    for step in steps:
        reserve = min(reserve, step.credit - total)
        total += step.gain if step.drafted else LOSS_SHARE
        assert total + reserve + worst > -1e-9
        assert total + TRUST + worst > -1e-9
        assert step.credit <= MOST


@given(st.integers(0, 50), GAINS)
def test_never_shut_for_ever(pause: int, gains: list[float]) -> None:
    steps = drafted(DraftGate(pause), gains, 2000)
    assert max(b - a for a, b in pairwise(steps)) <= max(pause, (TRUST - min(gains)) / LOSS_SHARE) + 2
    if pause == 0:
        assert len(steps) == 2000


@pytest.mark.parametrize(
    ("levels", "chance", "cost"),
    [(1, 0.1, 1.0), (1, 0.1, 0.3), (1, 0.5, 1.4), (1, 0.5, 0.9), (1, 0.5, 0.55), (1, 0.7, 0.9), (3, 0.5, 1.7), (3, 0.5, 1.1),
     (1, 0.1, 0.05), (1, 0.3, 0.2), (1, 0.5, 0.4), (1, 0.5, 0.2), (1, 0.7, 0.6), (3, 0.3, 0.2), (3, 0.5, 0.7), (3, 0.7, 1.2)],
)  # fmt: skip
def test_as_good_as_the_better_of_always_and_never(levels: int, chance: float, cost: float) -> None:
    """Tokens per time over 3000 steps of a text whose drafts are accepted level by level with one chance."""

    def rate(rng: random.Random) -> float:
        gate, tokens, time = DraftGate(4), 0, 0.0
        for _ in range(3000):
            accepted = 0
            if gate.passes():
                while accepted < levels and rng.random() < chance:
                    accepted += 1
                gate.record(Outlook(0.0, cost))
                gate.verified(accepted)
                time += cost
            tokens += 1 + accepted
            time += 1.0
        return tokens / time

    always = (1 + sum(chance**k for k in range(1, levels + 1))) / (1 + cost)
    assert sum(rate(random.Random(seed)) for seed in range(10)) / 10 > max(0.99, 0.975 * always)


def test_a_step_that_failed_leaves_no_trace() -> None:
    gate = DraftGate(4)
    for cost in (9.0, 0.9):
        assert gate.passes()
        gate.record(Outlook(1.0, cost))
    gate.verified(0)
    assert gate.credit == TRUST - 0.9
