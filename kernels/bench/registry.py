"""Every case of every op, small ones for correctness first."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import ecospec_kernels
from bench import attention, experts, steps
from bench.case import Case


@cache
def cases() -> tuple[Case, ...]:
    """All of them."""
    return (*experts.cases(), *attention.cases(), *steps.cases())


def chosen(ops: Sequence[str] = (), timed: bool = False) -> list[Case]:
    """Cases of these ops (none named: all): the odd ones, or those that are timed."""
    return [c for c in cases() if (not ops or c.op in ops) and (c.work is not None) == timed]


def ops() -> list[str]:
    """The ops that have a Triton twin."""
    return sorted(path.parent.name for path in Path(ecospec_kernels.__file__).parent.glob("*/fused.py"))
