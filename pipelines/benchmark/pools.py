"""Invented pools in the shapes of real models: trees as a drafter's beam grows them, hard routing that is partly shared.

Legend: n nodes, L MoE layers, E experts, K top-k.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ecospec_runtime.config import PoolConfig
from ecospec_runtime.device_profile import DeviceProfile
from ecospec_runtime.pool import Candidates, Pool, pack_masks, path_products


@dataclass(frozen=True)
class Model:
    """What selection sees of a target."""

    layers: int  # with experts
    experts: int  # routed
    top_k: int


MODELS = {
    "Qwen3-235B-A22B": Model(94, 128, 8),
    "GPT-OSS-120B": Model(36, 128, 4),
    "DeepSeek-V3.1": Model(58, 256, 8),
    "small reference": Model(7, 48, 4),
}
SHAPES = {
    12: PoolConfig(depth=3, beam=2, width=4),
    24: PoolConfig(depth=4, beam=3, width=6),
    36: PoolConfig(depth=6, beam=4, width=6),
    48: PoolConfig(depth=6, beam=4, width=8),
    60: PoolConfig(depth=6, beam=4, width=10),
}


def draw_pool(rng: np.random.Generator, model: Model, shape: PoolConfig) -> Candidates:
    """A pool whose siblings share at most all of their parent's probability, and whose tokens share part of their experts."""
    parents, acceptance = draw_tree(rng, shape)
    masks = pack_masks(draw_routing(rng, model, parents), model.experts)
    n, links = len(parents), np.array(parents, np.int64)
    depths = np.ones(n, np.int64)
    for i, parent in enumerate(parents):
        depths[i] = 1 if parent < 0 else depths[parent] + 1
    zeros, accepted = np.zeros(n, np.int64), np.array(acceptance, np.float32)
    pool = Pool(
        tokens=np.arange(n), parents=links, depths=depths, ranks=zeros, log_probs=np.log(accepted), state_rows=zeros,
        states=np.zeros((1, 1), np.float32), entropies=np.zeros(2, np.float32), root_token=0, levels=shape.depth,
    )  # fmt: skip
    reach = path_products(accepted, links)
    return Candidates(pool, accepted, reach, masks[1:], masks[0], model.layers, model.experts)


def draw_tree(rng: np.random.Generator, shape: PoolConfig) -> tuple[list[int], list[float]]:
    """Parents and acceptance of a tree: the best `width` children of a level stay, the best `beam` of those expand."""
    parents: list[int] = []
    acceptance: list[float] = []
    frontier = [(-1, 1.0)]
    sharpness = rng.uniform(0.5, 2.5)  # of this position: how sure the drafter is
    for _ in range(shape.depth):
        children = []
        for parent, reach in frontier[: shape.beam]:
            logits = (
                np.sort(rng.normal(0.0, 1.0, shape.width) * sharpness)[::-1] - sharpness * np.arange(shape.width) / 2
            )
            weights = np.exp(logits + sharpness)
            shares = weights / (1.0 + weights.sum())
            children += [(reach * p, parent, p) for p in shares.tolist()]
        children.sort(key=lambda child: -child[0])
        frontier = []
        for reach, parent, p in children[: shape.width]:
            frontier.append((len(parents), reach))
            parents.append(parent)
            acceptance.append(p)
    return parents, acceptance


def draw_routing(rng: np.random.Generator, model: Model, parents: list[int]) -> NDArray[np.int64]:
    """Experts of root and nodes `[1 + n, L, K]`: some are liked by every token of a text, some are inherited from the parent.

    Every other time the root stands apart, as where the text takes a turn: what the candidates share is not paid for by it, and
    nodes may pay only together.
    """
    likeness, inherited, apart = rng.uniform(0.0, 3.0), rng.uniform(0.0, 0.7), rng.random() < 0.5
    liked_LE = likeness * rng.normal(size=(model.layers, model.experts))
    own = rng.normal(size=(1 + len(parents), model.layers, model.experts)).astype(np.float32)
    for i, parent in enumerate(parents):
        own[i + 1] = inherited * own[parent + 1] + (1.0 - inherited**2) ** 0.5 * own[i + 1]
    scores = own + liked_LE
    if apart:
        scores[0] = own[0]
    return np.argpartition(-scores, model.top_k, axis=-1)[..., : model.top_k]


def draw_profile(rng: np.random.Generator, model: Model) -> DeviceProfile:
    """A device on which a plain step takes 1 ms, of which 40 to 90 % go to experts and 0.5 to 10 % to a token."""
    experts_ms, token_ms = rng.uniform(0.4, 0.9), rng.uniform(0.005, 0.1)
    return DeviceProfile(
        device="invented", slug="invented", dtype="bfloat16", threads=1, versions={}, per_token_ms=token_ms,
        fixed_ms=max(0.0, 1.0 - experts_ms - token_ms), per_expert_ms=experts_ms / (model.layers * model.top_k),
        heldout_error=0.0, plain_ms=1.0, expert_share=experts_ms,
    )  # fmt: skip
