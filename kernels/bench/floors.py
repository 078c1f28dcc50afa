"""Bytes and floor times of every op at real shapes, and the estimate for `select_nodes`: computed, no GPU needed.

    PYTHONPATH=.:kernels python -m bench.floors             the tables of kernels/README.md
    PYTHONPATH=.:kernels python -m bench.floors --write     put them there
    PYTHONPATH=.:kernels python -m bench.floors --all       every case that `make gpu-check` times

A floor is the larger of bytes over published bandwidth and products over published peak (marked *). Launches, a few microseconds
each, are not in it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bench import registry
from bench.case import Case, Work
from bench.models import CHIPS, CONTEXTS, DEEPSEEK, GPT_OSS, Chip
from ecospec_kernels.bitsets import words_for
from ecospec_kernels.select_nodes.fused import shape_options

README = Path(__file__).resolve().parents[1] / "README.md"
MARK = "<!-- {} of `python -m bench.floors --write` -->"
SHOWN = ("1 row", "8 rows", "64 rows")  # of those that are timed
LOAD, CACHED_LOAD = 300, 40  # clocks of a load from the second-level cache and from the first
WAITS = {  # clocks of a round that nothing hides, each the latency of one dependent step
    "the first load of covered words, from the second-level cache": LOAD,
    "six reductions over the block: shuffles, two barriers and a way through shared memory each": 6 * 150,
    "double-precision score with a division": 200,
    "the chosen set: a load, an `or` and a store": 400,
    "two more barriers": 2 * 40,
}
LAUNCH_MS, FIRST_READ_MS = 0.005, 0.005
SELECT = (64, 58, 256)  # nodes, layers, experts of the bar


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


class Round(NamedTuple):
    """Clocks of one round of `select_nodes` by what takes them: pipes that work side by side, and waits one after the other."""

    pipes: dict[str, float]
    waits: dict[str, float]

    @property
    def overlapped(self) -> float:
        """Pipes side by side."""
        return max(self.pipes.values()) + sum(self.waits.values())

    @property
    def serial(self) -> float:
        """Nothing at the same time as anything else."""
        return sum(self.pipes.values()) + sum(self.waits.values())


def round_of(chip: Chip, nodes: int, layers: int, experts: int) -> Round:
    """In one block, which has one processor to itself, all nodes being open."""
    wide = words_for(experts)
    words = nodes * layers * wide
    chunks = -(-layers // shape_options(nodes, wide, nodes)["LB"])
    pipes = {
        f"load {4 * words} bytes": 4 * words / chip.cache_rate,
        f"count the bits of {words} words": words / chip.popcounts,
        "address, `or` and add: 4 operations a word": 4 * words / chip.operations,
    }
    wait = CACHED_LOAD if 4 * words <= chip.cache else LOAD
    chunk = f"{chunks} chunks of layers: a load each, from the second-level cache where the sets do not fit the first"
    return Round(pipes, {chunk: chunks * wait, **WAITS})


def select_ms(chip: Chip, clocks: float, budget: int) -> float:
    """Rounds of so many clocks, a launch and the first read from memory."""
    return budget * clocks / chip.clock * 1e3 + LAUNCH_MS + FIRST_READ_MS


def estimate() -> str:
    """The arithmetic for `SELECT`."""
    rounds = [round_of(chip, *SELECT) for chip in CHIPS]
    lines = [["clocks of one round", *(chip.name for chip in CHIPS)], ["---", *["---:"] * len(CHIPS)]]
    for part in ("pipes", "waits"):
        for name in getattr(rounds[0], part):
            lines.append([name, *(f"{getattr(one, part)[name]:.0f}" for one in rounds)])
    for name, field in (("pipes side by side, then the waits", "overlapped"), ("nothing side by side", "serial")):
        clocks = [getattr(one, field) for one in rounds]
        lines.append([f"together, {name}", *(f"{count:.0f}" for count in clocks)])
        for budget in (16, 64):
            times = (select_ms(chip, count, budget) for chip, count in zip(CHIPS, clocks, strict=True))
            lines.append([f"**ms, {budget} rounds**", *(f"**{time:.3f}**" for time in times)])
    lines.append(["at, GHz", *(f"{chip.clock / 1e9:.2f}" for chip in CHIPS)])
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
