"""The exact optimum of `throughput` with 0/1 routing: a maximum closure, found by a minimum cut.

Nodes of the pool carry what they are worth, experts what they cost; a node needs its parent and every expert that the root
does not bring, so that the best closed set is the closure of largest sum (Picard, "Maximal closure of a graph", Management
Science 1976). It is the yardstick of the fast rule, not a rule for decoding: a pool takes milliseconds.

Experts that the same nodes need are one element. Capacities are integers in which an expert's cost is exact, so that only the
worths of the nodes are rounded (and costs, where layers differ); all of them together stay below 2**30. Legend: n nodes of the pool.
"""

from __future__ import annotations

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from ecospec_runtime.device_profile import DeviceProfile
from ecospec_runtime.policies.base import reach_probabilities
from ecospec_runtime.pool import Candidates

LARGEST = 2**30  # of the sum of all gains, in units; the solver adds up 32-bit integers
UNCUTTABLE = 2**31 - 1

Edges = list[tuple[int, int, int]]  # from, to, capacity


def exact_set(candidates: Candidates, profile: DeviceProfile, price: float) -> list[int]:
    """Nodes of the closed set with the largest sum of V - price * (time it adds to the pass), ascending.

    `price` is in tokens per ms. Empty if no set earns what a plain step saves.
    """
    parents = candidates.pool.parents.tolist()
    values = reach_probabilities(candidates, parents)
    worth = [value - price * profile.per_token_ms for value in values]
    expert_cost = price * profile.per_expert_ms
    chosen = maximum_closure(worth, parents, needs(candidates, profile.layer_costs), expert_cost)
    return chosen if net_worth(candidates, chosen, profile, price) > 0.0 else []


def net_worth(candidates: Candidates, chosen: list[int], profile: DeviceProfile, price: float) -> float:
    """Sum of V over a closed set less the price of the time that it adds to a plain step's; 0 for the empty set."""
    if not chosen:
        return 0.0
    values = reach_probabilities(candidates, candidates.pool.parents.tolist())
    union = 0
    for node in chosen:
        union |= candidates.masks[node]
    experts = profile.reads(union & ~candidates.root_mask, candidates.experts)
    added_ms = profile.plain_saving_ms + profile.per_token_ms * len(chosen) + profile.per_expert_ms * experts
    return sum(values[node] for node in chosen) - price * added_ms


def needs(candidates: Candidates, layer_costs: tuple[float, ...]) -> dict[tuple[int, ...], float]:
    """What the experts beyond the root's that exactly these nodes need cost, in experts of mean cost, by nodes (ascending)."""
    if not candidates.masks:
        return {}
    bits = candidates.layers * candidates.experts
    uncovered = ~candidates.root_mask
    rows = [(mask & uncovered).to_bytes((bits + 7) // 8, "little") for mask in candidates.masks]
    table = np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), -1)
    needed_Bn = np.unpackbits(table, axis=1, bitorder="little").T
    groups: dict[tuple[int, ...], float] = {}
    for bit in np.flatnonzero(needed_Bn.any(axis=1)).tolist():
        nodes = tuple(np.flatnonzero(needed_Bn[bit]).tolist())
        groups[nodes] = groups.get(nodes, 0.0) + (layer_costs[bit // candidates.experts] if layer_costs else 1.0)
    return groups


def maximum_closure(
    worth: list[float], parents: list[int], groups: dict[tuple[int, ...], float], expert_cost: float
) -> list[int]:
    """The closed set of nodes, ascending, with the largest sum of worth less `expert_cost` for each expert it needs.

    `worth` `[n]`, `parents` `[n]` (-1: the root); `groups` as `needs` gives them. Ties go to the smaller set.
    """
    gains = sum(w for w in worth if w > 0.0)
    if gains <= 0.0:
        return []
    scale = LARGEST / gains
    if scale * expert_cost >= 1.0:
        scale = int(scale * expert_cost) / expert_cost
    n, source = len(worth), len(worth) + len(groups)
    sink = source + 1
    edges: Edges = []
    for i, (w, parent) in enumerate(zip(worth, parents, strict=True)):
        units = min(abs(round(scale * w)), UNCUTTABLE)
        edges.append((source, i, units) if w > 0.0 else (i, sink, units))
        if parent >= 0:
            edges.append((i, parent, UNCUTTABLE))
    for j, (nodes, count) in enumerate(groups.items(), n):
        edges.append((j, sink, min(round(scale * expert_cost * count), UNCUTTABLE)))
        edges += [(i, j, UNCUTTABLE) for i in nodes]
    return sorted(node for node in source_side(edges, source, sink) if node < n)


def source_side(edges: Edges, source: int, sink: int) -> list[int]:
    """Vertices on the source's side of a minimum cut: those that the residual graph of a maximum flow reaches."""
    tails, heads, capacities = np.array(edges, np.int64).T
    graph = csr_array((capacities.astype(np.int32), (tails, heads)), shape=(sink + 1, sink + 1))
    left = graph.astype(np.int64) - maximum_flow(graph, source, sink).flow.astype(np.int64)
    left.data = (left.data > 0).astype(np.int8)
    left.eliminate_zeros()
    reached: list[int] = breadth_first_order(left, source, return_predecessors=False).tolist()
    return reached
