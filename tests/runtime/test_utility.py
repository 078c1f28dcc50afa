"""Cascade's rule: which chain is drafted, how its length is found, when speculation is off."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecospec_runtime.gate import LOSS_SHARE, Outlook, repaying
from ecospec_runtime.policies.utility import BACK_OFF, UtilityGate, UtilityPolicy
from tests.pools import make_candidates, make_profile


def lengths(gate: UtilityGate, accepted: Callable[[int], float], steps: int, cost: float = 0.2) -> list[int]:
    """Length drafted in each step, 0 for a plain one; a chain of k costs k times `cost` plain steps more."""
    found = []
    for _ in range(steps):
        depth = (gate.depth or 0) if gate.passes() else 0
        found.append(depth)
        if depth:
            gate.record(Outlook(0.0, cost * depth))
            gate.verified(accepted(depth))  # type: ignore[arg-type]
    return found


def runs(found: list[int]) -> list[tuple[int, int]]:
    """(length, steps in a row) of what `lengths` found."""
    edges = [0, *(i for i in range(1, len(found)) if found[i] != found[i - 1]), len(found)]
    return [(found[a], b - a) for a, b in pairwise(edges)]


def test_the_chain_follows_the_likeliest_child() -> None:
    candidates = make_candidates([-1, -1, 1, 1, 0, 3], [0.4, 0.5, 0.2, 0.7, 0.9, 0.6], [], 0, 1, 4)
    assert UtilityPolicy().select(candidates, make_profile(), 0) == [1, 3, 5]
    assert UtilityPolicy(budget=2).select(candidates, make_profile(), 0) == [1, 3]


def test_cost_is_what_a_step_takes_beyond_a_plain_one() -> None:
    """Plain step 1 ms, half of it experts: a node takes 0.01 ms and 1 - overlap of 0.5 ms."""
    candidates, profile = make_candidates([-1, 0], [0.8, 0.5], [], 0, 1, 4), make_profile()
    saving = profile.model_copy(update={"plain_saving_ms": 0.1})
    policy = UtilityPolicy(overlap=0.4)
    assert policy.outlook(candidates, [0, 1], profile, 0.25) == pytest.approx((0.8 + 0.4, 0.25 + 2 * 0.31))
    assert policy.outlook(candidates, [0, 1], saving, 0.25).cost == pytest.approx(0.25 + 2 * 0.31 + 0.1)
    assert policy.outlook(None, [], saving, 0.25) == pytest.approx((0.0, 0.25))


def test_the_climb_ends_at_the_length_of_highest_utility() -> None:
    """All of up to three are accepted: U = (1 + min(k, 3)) / (1 + 0.2 k) is 1.25, 2.14, 2.5, 2.22 for k = 1 to 4."""
    found = lengths(UtilityPolicy().gate(6), lambda k: min(k, 3), 80)
    assert runs(found)[:6] == [(2, 4), (3, 4), (4, 4), (3, 16 + 4), (4, 4), (2, 4)]
    assert found.count(3) > 50


def test_a_test_goes_down_too_and_ends_after_so_many_trials() -> None:
    gate = UtilityPolicy(trials=3).gate(8)
    gate.depth = 5
    assert runs(lengths(gate, lambda k: 0, 30))[:4] == [(5, 4), (4, 4), (3, 4), (0, 16)]
    gate = UtilityPolicy().gate(8)
    gate.depth = 4
    assert runs(lengths(gate, lambda k: min(k, 2), 40))[:4] == [(4, 4), (5, 4), (3, 4), (2, 4 + 16 + 4)]


def test_speculation_is_off_for_twice_as_long_each_time_and_comes_back() -> None:
    gate = UtilityPolicy(pause=16).gate(6)
    found = lengths(gate, lambda k: 0, 8 + 16 + 4 + 32 + 4 + 64)
    assert runs(found) == [(2, 4), (1, 4), (0, 16), (1, 4), (0, 32), (1, 4), (0, 64)]
    assert runs(lengths(gate, lambda k: k, 40)) == [(1, 4), (2, 4), (3, 4), (4, 4 + 16 + 4), (5, 4)]
    assert runs(lengths(gate, lambda k: 0, 80))[-1][0] == 0


def test_no_chain_is_longer_than_the_pool() -> None:
    assert set(lengths(UtilityPolicy().gate(3), lambda k: k, 200)) == {2, 3}
    assert set(lengths(UtilityPolicy().gate(1), lambda k: k, 200)) == {1}


@given(st.integers(1, 8), st.integers(1, 5), st.integers(1, 5), st.integers(1, 20), st.data())
def test_never_off_for_ever(longest: int, trial: int, trials: int, pause: int, data: st.DataObject) -> None:
    policy = UtilityPolicy(trial=trial, trials=trials, pause=pause)
    outcomes = data.draw(st.lists(st.integers(0, 8), min_size=1, max_size=20))
    step = iter(range(10**6))
    found = lengths(policy.gate(longest), lambda k: min(k, outcomes[next(step) % len(outcomes)]), 1000)
    assert max(found) <= longest
    most_lost = 0.2 * longest * trial * trials
    assert max((count for length, count in runs(found) if length == 0), default=0) <= max(
        BACK_OFF * pause, most_lost / LOSS_SHARE + 1
    )


def test_a_dear_test_is_off_for_as_long_as_repays_it() -> None:
    """Four steps of a chain of one lose 1.204 tokens a test, those of two twice that; sixteen pauses of 2 would repay 0.3."""
    found = runs(lengths(UtilityPolicy(pause=2).gate(6), lambda k: 0, 2000, cost=0.301))
    assert [count for length, count in found if length == 0][:8] == [2, 4, 8, 16, 32, 64, 128, 151]
    assert repaying(1.204) == 151


def test_a_step_that_failed_leaves_no_trace() -> None:
    gates = [UtilityPolicy(trial=1).gate(4) for _ in range(2)]
    gates[0].record(Outlook(0.0, 9.0))
    for gate in gates:
        assert gate.passes()
        gate.record(Outlook(0.0, 0.2))
        gate.verified(1)
    assert gates[0] == gates[1]
