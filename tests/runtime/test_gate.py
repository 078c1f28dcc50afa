"""When drafting pauses and when it is tried again."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ecospec_runtime.gate import LONGEST, DraftGate, Outlook


def drafted(gate: DraftGate, gains: list[float], steps: int) -> list[int]:
    """Steps that draft, always promising much; each takes the next gain, the last one for ever."""
    found = []
    for step in range(steps):
        if gate.passes():
            gate.record(Outlook(9.0, 5.0 - gains[min(len(found), len(gains) - 1)]))
            gate.verified(5)
            found.append(step)
    return found


def test_waits_grow_while_drafting_fails_and_end_when_it_pays() -> None:
    assert drafted(DraftGate(4), [-1.0], 120) == [0, 1, 6, 15, 32, 65, 98]
    assert drafted(DraftGate(4), [-1.0, -1.0, -1.0, 0.5], 30)[:5] == [0, 1, 6, 15, 16]
    assert drafted(DraftGate(4), [-1.0, -1.0, 0.1, -1.0], 30)[:5] == [0, 1, 6, 7, 12], "a success starts the waits anew"


def test_a_few_bad_steps_do_not_shut_what_has_paid() -> None:
    assert drafted(DraftGate(4), [0.5] * 10 + [-0.5] * 2 + [0.5], 40) == list(range(40))


@given(st.integers(0, 50), st.lists(st.floats(-2, 2), min_size=1))
def test_never_shut_for_ever(pause: int, gains: list[float]) -> None:
    steps = drafted(DraftGate(pause), gains, 400)
    assert max(b - a for a, b in pairwise(steps)) <= max(pause, LONGEST) + 1
    if pause == 0:
        assert len(steps) == 400
