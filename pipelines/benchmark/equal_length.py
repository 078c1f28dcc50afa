"""Experts read at equal accepted length, by replay: the trade that the paper is about, apart from what experts cost on a device.

A curve is one policy over its budgets or prices: tokens per pass against distinct experts per layer and pass. `throughput` is
asked twice: with the device's profile, in which experts are a part of the time, and with one that charges experts only. Ceilings
say what is left: true routing, the exact optimum (a minimum cut), and true acceptance as well. Nothing pauses.

Legend: p points of a curve, P prompts, B bootstrap draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ecospec_runtime.config import Config
from ecospec_runtime.device_profile import DeviceProfile
from ecospec_runtime.policies import POLICIES, PolicySpec
from ecospec_runtime.pool import Candidates
from ecospec_train.closure import exact_set
from ecospec_train.plots import pyplot, save
from ecospec_train.replay import ReplayRows, load_rows, replay_steps
from ecospec_train.replay_pools import CutPools
from pipelines.benchmark.acceptance import Told, truth
from pipelines.benchmark.run_folder import RunFolder
from pipelines.benchmark.simulated import experts_only

Array = NDArray[np.float64]

BUDGETS = range(1, 17)
PRICES = tuple(np.geomspace(0.05, 5.0, 40).tolist())  # times plain decoding's rate
FEW_PRICES = PRICES[::2]  # of the exact optimum, which takes milliseconds a pool
LENGTHS = (1.5, 2.0, 2.5, 3.0, 3.5, 4.0)  # tokens per pass at which curves are compared
DRAWS = 300
SHARING = 8  # nodes of the sets whose sharing is measured
RIVALS = ("confidence, as published", "confidence", "ratio")
OWN = ("throughput", "throughput, experts only")
BLIND = "throughput, blind to experts"
CEILINGS = ("exact optimum, experts only, true routing", "exact optimum, true routing and acceptance")


class ExactPolicy(Config):
    """The best set for a price, by minimum cut; it needs hard routing."""

    price: float = 0.0

    name: ClassVar[str] = "exact"
    drafts: ClassVar[bool] = True
    needs_routing: ClassVar[bool] = True

    def select(self, candidates: Candidates, profile: DeviceProfile, context: int) -> list[int]:
        """See `Policy.select`."""
        return exact_set(candidates, profile, self.price)

    def parameters(self) -> dict[str, Any]:
        """See `Policy.parameters`."""
        return self.model_dump()


@dataclass(frozen=True)
class Curve:
    """A policy over its budgets or prices."""

    name: str
    settings: list[float]  # [p]
    totals: Array  # [p, P, 4] tokens, passes, experts of all layers, nodes
    layers: int

    def points(self, weights_P: Array | None = None) -> tuple[Array, Array]:
        """Tokens per pass and experts per layer and pass `[p]`, prompts weighed if asked."""
        sums = self.totals.sum(1) if weights_P is None else np.einsum("pPc,P->pc", self.totals, weights_P)
        return sums[:, 0] / sums[:, 1], sums[:, 2] / sums[:, 1] / self.layers

    def to_dict(self) -> dict[str, Any]:
        """JSON-compatible form."""
        lengths, experts = self.points()
        nodes = self.totals[..., 3].sum(1) / self.totals[..., 1].sum(1)
        columns = (self.settings, lengths.tolist(), experts.tolist(), nodes.tolist())
        names = ("setting", "accept_length", "experts_per_layer", "nodes")
        return {
            "name": self.name,
            "points": [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)],
        }


def at_length(lengths: Array, experts: Array, wanted: float) -> float:
    """Experts at an accepted length, interpolated between the neighbouring points; NaN beyond them."""
    order = np.argsort(lengths, kind="stable")
    return float(np.interp(wanted, lengths[order], experts[order], left=np.nan, right=np.nan))


def totals_of(spec: PolicySpec, rows: ReplayRows, profile: DeviceProfile, oracle: bool) -> Array:
    """Tokens, passes, experts and nodes by prompt: [P, 4]."""
    totals = np.zeros((len(rows.prompts), 4))
    for prompt, record, _, _ in replay_steps(spec, rows, profile, oracle):
        totals[prompt] += len(record.emitted), 1, record.union, len(record.tokens)
    return totals


def trace_curve(
    name: str, spec: PolicySpec, settings: Sequence[float], rows: ReplayRows, profile: DeviceProfile, oracle: bool = False
) -> Curve:  # fmt: skip
    """`spec` over budgets, or over prices in multiples of plain decoding's rate. It begins with plain decoding: setting 0."""
    found = [totals_of(PolicySpec(name="off"), rows, profile, False)]
    for setting in settings:
        price = {"price": setting / profile.plain_ms} if "budget" not in spec.parameters else {"budget": int(setting)}
        found.append(totals_of(spec.model_copy(update={"parameters": spec.parameters | price}), rows, profile, oracle))
    return Curve(name, [0.0, *settings], np.stack(found), rows.layers)


def told_rows(run: RunFolder) -> ReplayRows:
    """The confirming prompts, scored by a head that knows what the target takes."""
    told, traces = Told(run.predictor), run.traces
    for shard in traces.shards():
        for row in np.flatnonzero(np.isin(shard.prompt_id, list(run.confirming))).tolist():
            pool = shard.pool(row)
            told.learn(pool, truth(pool, shard.next_tokens_of(row).astype(np.int64))[0])
    return load_rows(traces, told, run.confirming, run.positions)  # type: ignore[arg-type]


def curves(run: RunFolder, rows: ReplayRows) -> list[Curve]:
    """Rivals, `throughput` in its forms, and the ceilings, on the confirming prompts."""
    POLICIES[ExactPolicy.name] = ExactPolicy  # type: ignore[assignment]  # for `replay` in this process only
    device, reads, best = run.profile, experts_only(run.profile, run.layers * run.top_k), rows.best

    def fixed(name: str, kind: Any) -> PolicySpec:
        return PolicySpec(name=name, parameters={"budget": 1}, acceptance=kind)

    ours = PolicySpec(name="throughput", parameters={"pause": 0}, acceptance=best)
    blind = ours.model_copy(update={"parameters": {"pause": 0, "node_experts": float(run.top_k)}})
    optimum = PolicySpec(name="exact", acceptance=best)
    return [
        trace_curve(RIVALS[0], fixed("confidence", "raw"), BUDGETS, rows, device),
        trace_curve(RIVALS[1], fixed("confidence", best), BUDGETS, rows, device),
        trace_curve(RIVALS[2], fixed("ratio", best), BUDGETS, rows, device),
        trace_curve(OWN[0], ours, PRICES, rows, device),
        trace_curve("throughput, true routing", ours, PRICES, rows, device, oracle=True),
        trace_curve(BLIND, blind, PRICES, rows, reads),
        trace_curve(OWN[1], ours, PRICES, rows, reads),
        trace_curve("throughput, experts only, true routing", ours, PRICES, rows, reads, oracle=True),
        trace_curve(CEILINGS[0], optimum, FEW_PRICES, rows, reads, oracle=True),
        trace_curve(CEILINGS[1], optimum.model_copy(update={"acceptance": "head"}),
                    FEW_PRICES, told_rows(run), reads, oracle=True),
    ]  # fmt: skip


def saved(own: Curve, rival: Curve, wanted: float) -> tuple[float, float, float] | None:
    """By what share `own` reads fewer experts than `rival` at an accepted length, and the 95 % interval over prompts.

    None where one of the curves does not get there.
    """

    def share(weights_P: Array | None) -> float:
        mine, theirs = (at_length(*curve.points(weights_P), wanted) for curve in (own, rival))
        return 1.0 - mine / theirs

    value = share(None)
    if np.isnan(value):
        return None
    prompts = own.totals.shape[1]
    draws = np.random.default_rng(0).multinomial(prompts, np.full(prompts, 1.0 / prompts), size=DRAWS)
    drawn = [value, *(share(weights.astype(np.float64)) for weights in draws)]
    low, high = np.nanpercentile(drawn, (2.5, 97.5)).tolist()
    return value, low, high


def sharing(rows: ReplayRows) -> dict[str, float]:
    """Share of the experts of a node that others of the same pass use, over the `SHARING` likeliest nodes of every position.

    `root`, `parent`: those two alone; `others`: the root and all other chosen nodes together.
    """
    sums = dict.fromkeys(("root", "parent", "others"), 0.0)
    count = 0
    for prompt in rows.prompts:
        pools = CutPools(prompt.shard, prompt.first, prompt.first + len(prompt), rows, rows.pool, rows.best)
        for row in range(len(prompt)):
            candidates = pools.candidates(row, "used")
            chosen = np.argsort(-candidates.reach, kind="stable")[:SHARING].tolist()
            parents = candidates.pool.parents.tolist()
            for node in chosen:
                own, others = candidates.masks[node], candidates.root_mask
                for other in chosen:
                    others |= candidates.masks[other] if other != node else 0
                above = candidates.root_mask if parents[node] < 0 else candidates.masks[parents[node]]
                for name, mask in (("root", candidates.root_mask), ("parent", above), ("others", others)):
                    sums[name] += (own & mask).bit_count() / own.bit_count()
                count += 1
    return {name: value / count for name, value in sums.items()}


def measure(run: RunFolder, rows: ReplayRows) -> tuple[dict[str, Any], list[Curve]]:
    """The figures of this part as JSON, and the curves to plot."""
    found = curves(run, rows)
    by_name = {curve.name: curve for curve in found}
    at = {
        curve.name: [None if np.isnan(x := at_length(*curve.points(), length)) else x for length in LENGTHS]
        for curve in found
    }
    savings = {
        own: {rival: [saved(by_name[own], by_name[rival], length) for length in LENGTHS] for rival in RIVALS}
        for own in OWN
    }
    result = {
        "lengths": LENGTHS, "acceptance": rows.best, "experts_at_length": at, "saved": savings,
        "sharing": sharing(rows) | {"by chance": run.top_k / run.experts}, "curves": [curve.to_dict() for curve in found],
    }  # fmt: skip
    return result, found


def plot(found: list[Curve], path: Path) -> bool:
    """Curves with the device's price on the left, with experts alone priced and the ceilings on the right; False without matplotlib."""
    plt = pyplot()
    if plt is None:
        return False
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.6), sharex=True, sharey=True)
    left = {*RIVALS, OWN[0], "throughput, true routing"}
    for curve in found:
        lengths, experts = curve.points()
        order = np.argsort(lengths)
        for axis, shown in zip(axes, (curve.name in left, curve.name in RIVALS or curve.name not in left), strict=True):
            if shown:
                style = "--" if "true routing" in curve.name else "-"
                axis.plot(
                    lengths[order], experts[order], style, marker=".", markersize=3, linewidth=1, label=curve.name
                )
    for axis, title in zip(axes, ("the price is one of time", "the price is one of experts only"), strict=True):
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("tokens per pass", fontsize=8)
        axis.set_ylabel("distinct experts per layer and pass", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.legend(fontsize=7)
    save(figure, path)
    return True
