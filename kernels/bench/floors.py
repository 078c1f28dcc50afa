"""Bytes and floor times of every op at real shapes, and the estimate for `select_nodes`: computed, no GPU needed.

    PYTHONPATH=.:kernels python -m bench.floors             the tables of kernels/README.md
    PYTHONPATH=.:kernels python -m bench.floors --write     put them there
    PYTHONPATH=.:kernels python -m bench.floors --all       every case that `make gpu-check` times

A floor is the larger of bytes over published bandwidth and products over published peak (marked *). Launches, a few microseconds
each, are not in it.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from bench import registry
from bench.case import Case, Work
from bench.models import CHIPS, CONTEXTS, DEEPSEEK, GPT_OSS, Chip
from ecospec_kernels.bitsets import words_for

README = Path(__file__).resolve().parents[1] / "README.md"
MARK = "<!-- {} of `python -m bench.floors --write` -->"
SHOWN = ("1 row", "8 rows", "64 rows")  # of those that are timed
WAITS = {  # clocks of a round that nothing hides, each the latency of one dependent step
    "covered words and sets: a load from the second-level cache": 300,
    "sums over a row, then two reductions and a broadcast over the block": 4 * 100,
    "double-precision score with a division": 200,
    "the chosen set: a load, an `or` and a store": 400,
    "two barriers": 2 * 40,
}
LAUNCH_MS, FIRST_READ_MS = 0.005, 0.005


def seconds(work: Work, chip: Chip) -> tuple[float, float]:
    """The least time that a chip can take by its published figures: for the bytes, for the products."""
    return (
        work.floor / chip.bytes_per_second,
        work.flops / chip.flops_per_second + work.float32 / chip.float32_per_second,
    )


def size(count: int) -> str:
    """Bytes in words."""
    for unit, least in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= least:
            return f"{count / least:.3g} {unit}"
    return f"{count} B"


def digits(value: float) -> str:
    """Three of them."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def table(cases: Sequence[Case]) -> str:
    """One line per case."""
    head = ["op", "model", "shape", "floor bytes", "moved", "loaded again", *(f"{chip.name}, us" for chip in CHIPS)]
    lines = [head, ["---"] * 3 + ["---:"] * (len(head) - 3)]
    for case in cases:
        work = case.work
        assert work is not None
        times = [seconds(work, chip) for chip in CHIPS]
        lines.append([f"`{case.op}`", case.model, case.shape, size(work.floor), f"{work.moved / work.floor:.2f}", size(work.repeats),
                      *(f"{digits(1e6 * max(pair))}{' *' * (pair[1] > pair[0])}" for pair in times)])  # fmt: skip
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def shown(case: Case) -> bool:
    """Whether the short table has this case: few sizes, and of ops that differ little between models one model."""
    rows = case.shape.split(" of ")[0].split(",")[0]
    if case.op == "tree_attention":
        return rows == "8 rows" or (rows in SHOWN and case.shape.endswith(f"{CONTEXTS[-1]} cached"))
    if case.op in ("argmax_rows", "draw_rows"):
        return rows in SHOWN and case.model == GPT_OSS.name
    return rows in SHOWN if case.op == "expert_mlp" else case.model == DEEPSEEK.name


def round_clocks(chip: Chip, nodes: int, layers: int, experts: int) -> dict[str, float]:
    """Clocks of one round of `select_nodes` in one block, which has one processor to itself."""
    words = nodes * layers * words_for(experts)
    return {
        f"load {4 * words} bytes at {chip.cache_bytes} a clock": 4 * words / chip.cache_bytes,
        f"count the bits of {words} words at {chip.popcounts} a clock": words / chip.popcounts,
        f"address, `or` and add: 4 operations a word at {chip.operations} a clock": 4 * words / chip.operations,
        **WAITS,
    }


def select_ms(chip: Chip, nodes: int, layers: int, experts: int, budget: int) -> float:
    """Estimate, nothing overlapping: rounds of `round_clocks`, a launch and the first read from memory."""
    clocks = sum(round_clocks(chip, nodes, layers, experts).values())
    return budget * clocks / chip.clock * 1e3 + LAUNCH_MS + FIRST_READ_MS


def estimate() -> str:
    """The arithmetic for 64 nodes, 58 layers of 256 experts and a budget of 64."""
    shape = (64, 58, 256)
    parts = [round_clocks(chip, *shape) for chip in CHIPS]
    lines = [["clocks of one round", *(chip.name for chip in CHIPS)], ["---", *["---:"] * len(CHIPS)]]
    for values in zip(*(part.items() for part in parts), strict=True):
        name = values[0][0] if len({key for key, _ in values}) == 1 else re.sub(r" at \d+ a clock", "", values[0][0])
        lines.append([name, *(f"{value:.0f}" for _, value in values)])
    lines.append(["together, one after the other", *(f"{sum(part.values()):.0f}" for part in parts)])
    lines.append(
        [
            "us at this clock, GHz",
            *(
                f"{1e6 * sum(p.values()) / c.clock:.2f} at {c.clock / 1e9:.2f}"
                for p, c in zip(parts, CHIPS, strict=True)
            ),
        ]
    )
    for budget in (16, 64):
        lines.append(
            [
                f"**ms for {budget} rounds**, launch and first read",
                *(f"**{select_ms(chip, *shape, budget):.3f}**" for chip in CHIPS),
            ]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def tables() -> dict[str, str]:
    """What the README holds, by name."""
    return {"floors": table([case for case in registry.chosen(timed=True) if shown(case)]), "select": estimate()}


def written(text: str) -> str:
    """A README's text with the tables put between their marks. ValueError without marks."""
    for name, content in tables().items():
        begin, end = MARK.format(name), MARK.format(f"end {name}")
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"the lines {begin} and {end} must each stand once")
        text = text[: text.index(begin) + len(begin)] + f"\n{content}\n" + text[text.index(end) :]
    return text


def main(arguments: list[str] | None = None) -> None:
    """Print or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every case that is timed")
    parser.add_argument("--write", action="store_true", help=f"into {README.name}")
    chosen = parser.parse_args(arguments)
    if chosen.write:
        README.write_text(written(README.read_text(encoding="utf-8")), encoding="utf-8")
    elif chosen.all:
        print(table(registry.chosen(timed=True)))
    else:
        print("\n\n".join(tables().values()))


if __name__ == "__main__":
    main()
