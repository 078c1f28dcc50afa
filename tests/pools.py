"""Candidates and a device for tests of selection, and the optimum over every closed set."""

from __future__ import annotations

from typing import Any

import numpy as np

from ecospec_runtime.config import GenerationConfig, PoolConfig
from ecospec_runtime.device_profile import DeviceProfile
from ecospec_runtime.pool import Candidates, Pool, pack_masks, path_products
from ecospec_runtime.sampling import Sampler

PLAIN_MS = 1.0


def make_profile(expert_ms: float = 0.02, token_ms: float = 0.01) -> DeviceProfile:
    return DeviceProfile(
        device="test", slug="test", dtype="float32", threads=1, versions={}, fixed_ms=0.4, per_token_ms=token_ms,
        per_expert_ms=expert_ms, heldout_error=0.0, plain_ms=PLAIN_MS, expert_share=0.5,
    )  # fmt: skip


def make_candidates(
    parents: list[int], acceptance: list[float], masks: list[int], root_mask: int, layers: int, experts: int
) -> Candidates:
    n, links = len(parents), np.array(parents, np.int64)
    depths = np.ones(n, np.int64)
    for i, parent in enumerate(parents):
        depths[i] = 1 if parent < 0 else depths[parent] + 1
    zeros = np.zeros(n, np.int64)
    accept = np.array(acceptance, np.float32)
    pool = Pool(
        tokens=np.arange(n), parents=links, depths=depths, ranks=zeros, log_probs=np.zeros(n, np.float32), state_rows=zeros,
        states=np.zeros((1, 1), np.float32), entropies=np.zeros(1, np.float32), root_token=0,
    )  # fmt: skip
    with np.errstate(all="ignore"):
        reach = path_products(accept, links)
    return Candidates(pool, accept, reach, masks, root_mask, layers, experts)


def random_candidates(
    rng: np.random.Generator, n: int, layers: int = 4, experts: int = 16, top_k: int = 2, likeness: float = 0.5
) -> Candidates:
    """A random tree whose nodes share part of their routing, with peaked acceptance."""
    parents = [int(rng.integers(-1, i)) if i else -1 for i in range(n)]
    acceptance = rng.beta(0.7, 0.9, n).tolist()
    scores = rng.gumbel(size=(n + 1, layers, experts)) + likeness * 4 * rng.normal(size=(layers, experts))
    masks = pack_masks(np.argsort(-scores, axis=-1)[..., :top_k], experts)
    return make_candidates(parents, acceptance, masks[1:], masks[0], layers, experts)


def worth(candidates: Candidates, chosen: list[int], price: float, profile: DeviceProfile) -> float:
    """The objective of `throughput` beyond the empty set: sum V - price * added pass time."""
    union = candidates.root_mask
    for i in chosen:
        union |= candidates.masks[i]
    reads, paid = (count_reads(candidates, mask, profile) for mask in (union, candidates.root_mask))
    added = profile.pass_ms(1 + len(chosen), reads) - profile.pass_ms(1, paid)
    return float(candidates.reach[chosen].sum()) - price * added


def exhaustive(candidates: Candidates, price: float, profile: DeviceProfile) -> float:
    """The best worth over every closed set: each node joins each set that holds its parent."""
    sets: list[tuple[float, int, int]] = [(0.0, 0, candidates.root_mask)]  # (worth without experts, members, union)
    for i, parent in enumerate(candidates.pool.parents.tolist()):
        gain = float(candidates.reach[i]) - price * profile.per_token_ms
        sets += [(w + gain, m | 1 << i, u | candidates.masks[i]) for w, m, u in sets if parent < 0 or m >> parent & 1]
    paid = count_reads(candidates, candidates.root_mask, profile)
    cost = price * profile.per_expert_ms
    return max(w - cost * (count_reads(candidates, u, profile) - paid) for w, _, u in sets)


def count_reads(candidates: Candidates, union: int, profile: DeviceProfile) -> float:
    """Experts of a set, each counted as its layer costs, bit by bit."""
    costs = profile.layer_costs or (1.0,) * candidates.layers
    bits = range(candidates.layers * candidates.experts)
    return sum(costs[bit // candidates.experts] for bit in bits if union >> bit & 1)


def check_noise(drafter: Any, sequence: Any, text: list[int]) -> None:
    """The children of the root are those of the drafter's logits plus the noise of the draw that comes next.

    `text`: what the sequence was told, one token a row; a row's token stands one place further on in the real text.
    """
    shape, sampler = PoolConfig(depth=1, beam=1, width=256), Sampler(GenerationConfig(temperature=1.5, seed=6))
    bare, pool = (drafter.expand(sequence, text[-1], shape, (0.5,), s) for s in (None, sampler))
    noise = sampler.noise(len(text) + 1, 4096)
    own = dict(zip(bare.tokens.tolist(), bare.log_probs.tolist(), strict=True))
    expected = np.array([own[token] + noise[token] for token in pool.tokens.tolist()])
    assert len(pool) == len(bare)
    np.testing.assert_allclose(np.diff(pool.log_probs), np.diff(expected), atol=1e-3)
    assert (np.diff(expected) <= 1e-3).all()
    assert pool.tokens.tolist() != bare.tokens.tolist() or len(pool) < 3
    again = drafter.expand(sequence, text[-1], shape, (0.5,), Sampler(GenerationConfig()))  # temperature 0: no noise
    np.testing.assert_array_equal(again.log_probs, bare.log_probs)
