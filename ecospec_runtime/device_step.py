"""A decoding step of fixed shape: draft, select, verify and commit without the host, so that a CUDA graph can replay it.

    state = DeviceState(target, engine.prefilled(prompt), capacity=4096)  # on one device
    pools = DeviceEagle3(...)                   # or a GivenPool
    step = DeviceStep(target, state, pools, rule, budget=7)
    replay = GraphedStep(step)                  # on a CUDA device; elsewhere call `step` itself
    tokens = read(replay(), target.source)      # the only wait for the device

A pass has as many rows as its bucket, 1, 2, 4 ... 64: powers of two, because the kernels' tiles are (16 rows or more: inside
a tile padding is free), seven graphs cover every size up to the most rows that the kernels take, and none is more than
half padding. Rows of padding repeat the root: they want its experts, so that not one more is read, nobody looks at
them, and none is ever accepted. Rows that the step may look at (`span`) are a second bucket, of the host's choice: attention
reads all of them. The host knows how many tokens it has read, so it knows the most rows that the next step can need.

What the host does in `Engine` and this step does not: penalties, log-probabilities, stop rules (the host applies them to what it reads),
and the search of `throughput` beyond `select_nodes`. `sampling.Draws` is the `choose` above temperature 0.

Legend of shapes: R rows of a pass (root first), N nodes of the pool, m nodes that may be chosen, C rows of the cache that a
step may look at, L MoE layers, W int32 words of a set of experts, F width of the drafter's features, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import index
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from ecospec_kernels import dispatch
from ecospec_kernels.select_nodes.reference import Rule
from ecospec_kernels.verify_tree.reference import Accepted
from ecospec_runtime.cache import FixedCache
from ecospec_runtime.errors import UserError

if TYPE_CHECKING:
    from ecospec_runtime.sequence import Prefilled
    from ecospec_runtime.target import Target

BUCKETS = (1, 2, 4, 8, 16, 32, 64)  # rows of a pass
WARM_UPS = 3  # before a capture: kernels are compiled and libraries choose their workspaces


class DevicePool(NamedTuple):
    """A candidate tree on the device. Parents come before children."""

    tokens: Tensor  # [N] int64
    parents: Tensor  # [N] int64 index of the parent, -1 for a child of the root, less for padding
    reach: Tensor  # [N] float32 probability that the node is accepted
    masks: Tensor  # [N, L, W] int32 predicted experts, see `ecospec_kernels.bitsets`; [N, 1, 1] zeros if nothing is predicted
    root_mask: Tensor  # [L, W] int32 those of the root


class Stepped(NamedTuple):
    """What a step leaves on the device; a replay overwrites it."""

    accepted: Accepted
    healthy: Tensor  # [1] bool: no NaN or Inf in hidden states or logits


class Pools(Protocol):
    """Where the pools of a step come from. Both methods run within the step: fixed shapes, no wait for the device."""

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Layers whose entering hidden states `extend` wants; see `Target.forward`."""
        ...

    def propose(self, state: DeviceState) -> DevicePool:
        """The pool below `state.root`."""
        ...

    def extend(self, state: DeviceState, accepted: Accepted, features_RF: Tensor | None) -> None:
        """Take note of a pass's accepted rows before `state` moves on. `features`: of all rows of the pass."""
        ...


class GivenPool:
    """Pools that the host writes: `fill` before each step."""

    aux_layers: tuple[int, ...] = ()

    def __init__(self, nodes: int, layers: int, words: int, device: torch.device | str = "cpu"):
        """Room for so many nodes, and sets of experts of `layers` times `words` words: 1 or more each, else ValueError."""
        if min(nodes, layers, words) < 1:
            raise ValueError(f"{nodes} nodes, {layers} layers and {words} words: each must be at least 1")
        reach = torch.zeros(nodes, device=device)
        tokens, parents = (torch.zeros(nodes, dtype=torch.int64, device=device) for _ in range(2))
        masks = torch.zeros(nodes, layers, words, dtype=torch.int32, device=device)
        self.pool = DevicePool(tokens, parents.fill_(-2), reach, masks, masks[0].clone())

    def fill(self, pool: DevicePool) -> None:
        """Copy a pool of at most as many nodes; the rest is padding. ValueError, and nothing copied, if a part does not fit."""
        room, nodes = len(self.pool.tokens), len(pool.tokens)
        if nodes > room:
            raise ValueError(f"a pool of {nodes} nodes does not fit {room}")
        for name, own, new in zip(DevicePool._fields, self.pool, pool, strict=True):
            shape = own.shape if name == "root_mask" else (nodes, *own.shape[1:])
            if new.shape != shape or new.dtype is not own.dtype or new.device != own.device:
                raise ValueError(
                    f"{name} of a pool of {nodes} nodes: {list(new.shape)} {new.dtype} on {new.device}, not {list(shape)} "
                    f"{own.dtype} on {own.device}"
                )
        self.pool.parents.fill_(-2)
        for own, new in zip(self.pool[:4], pool[:4], strict=True):
            own[:nodes].copy_(new)
        self.pool.root_mask.copy_(pool.root_mask)

    def propose(self, state: DeviceState) -> DevicePool:
        """See `Pools`."""
        return self.pool

    def extend(self, state: DeviceState, accepted: Accepted, features_RF: Tensor | None) -> None:
        """Nothing to note."""


class DeviceState:
    """One text being decoded, on the device: the root is chosen but not yet cached."""

    def __init__(self, target: Target, read: Prefilled, capacity: int):
        """After a prompt that the target has read. `capacity`: rows of the cache, those of the last pass included.

        ValueError if the prompt, whose last token is the root of the first pass, does not fit, and for half a row.
        """
        capacity = whole("a cache", capacity, "rows")
        past, device = len(read.prompt) - 1, target.device
        if capacity < len(read.prompt):
            raise ValueError(f"a prompt of {len(read.prompt)} tokens does not fit {capacity} rows")
        self.root = torch.tensor(read.prompt[-1:], device=device)  # [1]
        self.past = torch.tensor([past], device=device)  # [1] committed rows
        if not past:  # a pass that is not kept: the layers' shapes are known after it
            target.forward(self.root, self.past, None, read.cache, logits=False)
            target.commit(read.cache, 0, [])
        self.cache = FixedCache(read.cache, capacity)
        self.registers = [self.root, self.past]  # what a step writes anew, besides rows behind the committed ones


Choose = Callable[
    [Tensor, Tensor], Tensor
]  # logits [R, V] and positions [R] of what is chosen from them -> tokens [R] int64


def greedy(logits_RV: Tensor, positions_R: Tensor) -> Tensor:
    """Temperature 0."""
    return dispatch.argmax_rows(logits_RV)


def bucket(rows: int) -> int:
    """The smallest bucket for so many rows. ValueError beyond the largest."""
    found = next((size for size in BUCKETS if size >= rows), None)
    if found is None:
        raise ValueError(f"{rows} rows of a pass are more than {BUCKETS[-1]}")
    return found


def whole(name: str, number: int, unit: str) -> int:
    """`number`. ValueError unless it is a whole number: a float would fail within the step."""
    try:
        return index(number)
    except TypeError:
        raise ValueError(f"{name} of {number} {unit}: a whole number is wanted") from None


class DeviceStep:
    """One step over fixed buffers. Every shape follows from the arguments here, none from what the step meets."""

    def __init__(
        self, target: Target, state: DeviceState, pools: Pools | None = None, rule: Rule | None = None, budget: int = 0,
        span: int | None = None, choose: Choose = greedy,
    ):  # fmt: skip
        """`budget`: nodes that may be chosen by `rule` (0: plain decoding); `span`: rows looked at, by default all.

        ValueError for numbers that are not whole, a budget below 0 or without pools and rule, a pass beyond `BUCKETS`, a
        span that is smaller than a pass or larger than the cache.
        """
        budget = whole("a budget", budget, "nodes")
        if budget < 0:
            raise ValueError(f"a budget of {budget} nodes: 0 or more are wanted")
        if budget and (pools is None or rule is None):
            raise ValueError(f"a budget of {budget} nodes needs pools to choose from and a rule to choose by")
        self.target, self.state, self.pools, self.rule, self.budget = target, state, pools, rule, budget
        self.rows, self.choose = bucket(1 + budget), choose
        self.span = state.cache.capacity if span is None else whole("a span", span, "rows")
        if not self.rows <= self.span <= state.cache.capacity:
            raise ValueError(f"a span of {self.span} rows is not within {self.rows} and {state.cache.capacity}")

    @torch.no_grad()
    def __call__(self) -> Stepped:
        """Advance the state by one token or more. It must hold that past + rows <= span: the host knows a bound."""
        state, target, cache = self.state, self.target, self.state.cache
        aux_layers = () if self.pools is None else self.pools.aux_layers
        tokens_R, parents_R = self._chosen()
        sees_RR = ancestors(parents_R)
        positions_R = state.past + sees_RR.sum(1) - 1
        key_C = torch.arange(self.span, device=state.past.device)
        cache.rows, cache.span = state.past + torch.arange(self.rows, device=state.past.device), self.span
        mask_RC = (key_C < state.past).expand(self.rows, -1).index_copy(1, cache.rows, sees_RR)
        masks = target.masks(mask_RC, positions_R, key_C.index_copy(0, cache.rows, positions_R))
        target.arm(aux_layers)
        logits_RV = target.run(tokens_R, positions_R, masks, cache.inner).logits[0]
        healthy = torch.isfinite(target.take_hidden().sum(dtype=torch.float32)) & ~torch.isnan(logits_RV.sum())
        accepted = dispatch.verify_tree(self.choose(logits_RV, positions_R + 1), tokens_R[1:], parents_R[1:])
        if self.pools is not None:
            self.pools.extend(state, accepted, target.aux_states(aux_layers))
        for layer in cache.layers:
            length = dispatch.commit_path(layer.keys[0], layer.values[0], accepted.rows, accepted.number, state.past)
        state.past.copy_(length)
        state.root.copy_(accepted.root)
        return Stepped(accepted, healthy.view(1))

    def _chosen(self) -> tuple[Tensor, Tensor]:
        """Tokens `[R]` of the pass and the row of each one's parent, -1 for root and padding."""
        tokens_R = self.state.root.repeat(self.rows)
        parents_R = torch.full_like(tokens_R, -1)
        if self.budget and self.pools is not None:
            pool = self.pools.propose(self.state)
            chosen = dispatch.select_nodes(pool.reach, pool.parents, pool.masks, pool.root_mask, self.rule, self.budget)
            real_m, rows = chosen.nodes >= 0, slice(1, 1 + self.budget)
            tokens_R[rows] = torch.where(real_m, pool.tokens[chosen.nodes.clamp(min=0)], self.state.root)
            parents_R[rows] = chosen.parent_rows
        return tokens_R, parents_R


def ancestors(parents_R: Tensor) -> Tensor:
    """Which rows of the pass each row sees, bool `[R, R]`: the root, its path and itself; root and padding the root alone."""
    row = torch.arange(len(parents_R), device=parents_R.device)
    real = (parents_R >= 0) | (row == 0)
    sees = (row == parents_R.clamp(min=0)[:, None]) | ((row == row[:, None]) & real)
    for _ in range((len(parents_R) - 1).bit_length()):  # paths of twice the length
        sees = sees.float() @ sees.float() > 0
    return sees


def read(stepped: Stepped, source: str) -> list[int]:
    """The tokens of a step, on the host, in one transfer. UserError, naming `source`, if the target gave NaN or Inf."""
    accepted = stepped.accepted
    *tokens, number, healthy = torch.cat((accepted.tokens, accepted.number, stepped.healthy)).tolist()
    if not healthy:
        raise UserError(f"target {source}: NaN or Inf in hidden states or logits; `Engine` says in which layer")
    return tokens[:number]


class GraphedStep:
    """A step as a CUDA graph; calling it replays the graph. The state is where it was when the capture is done."""

    def __init__(self, step: DeviceStep):
        state, side = step.state, torch.cuda.Stream()
        before = [register.clone() for register in state.registers]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                step()
                for register, value in zip(state.registers, before, strict=True):
                    register.copy_(value)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.stepped = step()

    def __call__(self) -> Stepped:
        """One step."""
        self.graph.replay()
        return self.stepped
