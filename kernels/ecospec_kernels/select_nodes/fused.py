"""Triton kernel of `select_nodes`: see `reference.py` for the rule. One program does every step.

A step reads the sets of the open nodes once more (from the L1 cache after the first time), a few layers of all nodes at a
time, and counts the bits of their union with the covered words, which lie in memory; all else stays in registers. Scores
are float64 without fused multiply-add, so that ties fall as on the host.

How long that takes is computed, not measured, in `kernels/bench/floors.py`, for 64 nodes and 58 layers of 256 experts, whose sets
are 119 KB and fit the L1 cache of an A100 or later.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ecospec_kernels.checks import first
from ecospec_kernels.launch import Configuration, on_device, refuse_launch, smallest
from ecospec_kernels.select_nodes.reference import Rule, Selection, invalid

NODES, WORDS = (16, 64, 128), (4, 8, 16)  # sizes that are compiled
# Words of each node that are read at a time, by padded number of nodes: with others some chip's compiler spills.
CHUNKS = {16: 32, 64: 64, 128: 32}
MAX_NODES, MAX_WORDS = NODES[-1], WORDS[-1]
WARPS = 16


@triton.jit
def popcount(x):  # type: ignore[no-untyped-def]
    """Bits set in int32 words, as int32. LLVM knows the idiom and makes it one instruction."""
    u = x.to(tl.uint32, bitcast=True)
    u = u - ((u >> 1) & 0x55555555)
    u = (u & 0x33333333) + ((u >> 2) & 0x33333333)
    u = (u + (u >> 4)) & 0x0F0F0F0F
    return ((u * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _reads(rows, inside, covered, layers, limit, N: tl.constexpr, LB: tl.constexpr, W: tl.constexpr, LIMITED: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    """Size of the union of `covered` and each of N sets, and what it has over `limit`, layer by layer: int32 [N] each.

    `rows` [N]: pointers to the sets; `inside` [N]: those to read, the others are empty.
    """
    held, over = tl.zeros([N, LB, W], tl.int32), tl.zeros([N, LB], tl.int32)
    for start in range(0, layers, LB):
        layer = start + tl.arange(0, LB)[:, None]
        place, real = layer * W + tl.arange(0, W)[None, :], layer < layers
        taken = tl.load(covered + place, mask=real, other=0)
        sets = tl.load(rows[:, None, None] + place[None], mask=inside[:, None, None] & real[None], other=0)
        bits = popcount(sets | taken[None])
        held += bits
        if LIMITED:
            over += tl.maximum(tl.sum(bits, 2) - limit, 0)
    return tl.sum(tl.sum(held, 2), 1), tl.sum(over, 1)


@triton.jit(do_not_specialize=["n", "layers", "budget"])
def select_kernel(  # type: ignore[no-untyped-def]
    reach, parents, masks, root, parameters, covered, nodes, parent_rows, count,
    n, layers, budget,
    N: tl.constexpr, LB: tl.constexpr, W: tl.constexpr, RATIO: tl.constexpr, LIMITED: tl.constexpr,
):  # fmt: skip
    """All tensors contiguous. N: a power of two, at least n; LB layers of W words at a time. A budget of up to N.

    `covered` [layers * W]: room for the set of experts that are paid for.
    """
    base, expert_cost = tl.load(parameters), tl.load(parameters + 1)
    limit = tl.load(parameters + 3).to(tl.int32)
    node = tl.arange(0, N)
    all_words, word = layers * W, tl.arange(0, LB * W)
    for start in range(0, all_words, LB * W):
        real = start + word < all_words
        tl.store(covered + start + word, tl.load(root + start + word, mask=real, other=0), mask=real)
    tl.debug_barrier()
    rows = masks + node.to(tl.int64) * all_words
    held_n, over_n = _reads(rows, node < 0, covered, layers, limit, N, LB, W, LIMITED)
    paid = tl.max(held_n, 0).to(tl.float64)
    if LIMITED:
        paid += tl.load(parameters + 4) * tl.max(over_n, 0).to(tl.float64)
    parent = tl.load(parents + node, mask=node < n, other=-2).to(tl.int32)
    value = tl.load(reach + node, mask=node < n, other=0.0).to(tl.float64)
    value = tl.minimum(tl.where((value >= 0) & (value < float("inf")), value, 0.0), 1.0)
    state = (parent == -1).to(
        tl.int32
    )  # 1: open, 2: chosen. Flags would lie in scalar registers on ROCm, which are few
    total = base * 0.0
    for _ in range(budget):
        is_open = state == 1
        held_n, over_n = _reads(rows, is_open, covered, layers, limit, N, LB, W, LIMITED)
        reads = held_n.to(tl.float64)
        if LIMITED:
            reads += tl.load(parameters + 4) * over_n.to(tl.float64)
        new = reads - paid
        score = value / (new + base) if RATIO else value - base - expert_cost * new
        score = tl.where(is_open, score, float("-inf"))
        best = tl.max(score, 0)
        first = tl.min(tl.where(is_open & (score == best), node, N), 0)
        pick = tl.where(best > (float("-inf") if RATIO else 0.0), first, N)  # N, the parent of none: nothing is taken
        added = node == pick
        total += tl.sum(tl.where(added, score, 0.0), 0)
        paid = tl.where(pick < N, tl.sum(tl.where(added, reads, 0.0), 0), paid)
        worth = tl.sum(tl.where(added, value, 0.0), 0)
        value = tl.where(parent == pick, tl.minimum(value, worth), value)
        state = tl.where(added, 2, tl.where(parent == pick, 1, state))
        tl.debug_barrier()
        for start in range(0, all_words, LB * W):
            real = (start + word < all_words) & (pick < N)
            more = tl.load(masks + pick.to(tl.int64) * all_words + start + word, mask=real, other=0)
            tl.store(covered + start + word, tl.load(covered + start + word, mask=real, other=0) | more, mask=real)
        tl.debug_barrier()
    chosen = state == 2
    if not RATIO:
        chosen = tl.where(total > tl.load(parameters + 2), chosen, node < 0)
    row = tl.cumsum(chosen.to(tl.int32), 0)
    above = tl.sum(tl.where(parent[:, None] == node[None, :], row[None, :], 0), 1)
    tl.store(nodes + row - 1, node, mask=chosen)
    tl.store(parent_rows + row - 1, above, mask=chosen)
    number = tl.sum(chosen.to(tl.int32), 0)
    tl.store(count, number)
    blank = (node >= number) & (node < budget)
    tl.store(nodes + node, -1, mask=blank)
    tl.store(parent_rows + node, -1, mask=blank)


def shape_options(nodes: int, words: int, budget: int) -> dict[str, int]:
    """Compile-time sizes for so many nodes, int32 words a layer and nodes to choose."""
    padded, wide = smallest(max(nodes, budget), NODES), smallest(words, WORDS)
    return {"N": padded, "LB": CHUNKS[padded] // wide, "W": wide, "num_warps": WARPS}


def unsupported(
    reach_n: Tensor, parents_n: Tensor, masks_nLW: Tensor, root_LW: Tensor, rule: Rule, budget: int
) -> str | None:  # fmt: skip
    """Why this kernel does not take these arguments."""
    problem = invalid(reach_n, parents_n, masks_nLW, root_LW, rule, budget)
    words = masks_nLW.size(-1) * masks_nLW.element_size() // 4 if masks_nLW.dim() else 0
    return problem or first(
        f"more than {MAX_NODES} nodes" if max(len(reach_n), budget) > MAX_NODES else None,
        f"more than {MAX_WORDS} int32 words a layer" if words > MAX_WORDS else None,
    )


def select_nodes(
    reach_n: Tensor, parents_n: Tensor, masks_nLW: Tensor, root_LW: Tensor, rule: Rule, budget: int
) -> Selection:  # fmt: skip
    """Same contract as the reference."""
    refuse_launch("select_nodes", unsupported(reach_n, parents_n, masks_nLW, root_LW, rule, budget), reach_n)
    masks, root = masks_nLW.view(torch.int32), root_LW.view(torch.int32)
    n, layers, words = masks.shape
    options = shape_options(n, words, budget)
    if words < options["W"]:  # the kernel knows the number of words, so that it reads several at once
        masks, root = (F.pad(sets, (0, options["W"] - words)) for sets in (masks, root))
    # Here and not in the kernel: there it costs registers that ptxas then spills. A launch more, of fixed shape.
    parents_n = torch.where((parents_n < n) & (parents_n >= -1), parents_n, -2).long()
    covered, nodes, parent_rows, count = (
        torch.empty(size, dtype=torch.int32, device=reach_n.device)
        for size in (layers * options["W"], budget, budget, 1)
    )
    with on_device(reach_n):
        select_kernel[(1,)](
            reach_n, parents_n, masks, root, rule.parameters, covered, nodes, parent_rows, count, n, layers, budget,
            RATIO=rule.kind == "ratio", LIMITED=rule.limited, enable_fp_fusion=False, **options,
        )  # fmt: skip
    return Selection(nodes, parent_rows, count)


def configurations(backend: str) -> list[Configuration]:
    """Both rules, with and without a capacity, for every size of pool and set."""
    types = {"reach": "*fp32", "parents": "*i64", "parameters": "*fp64"}
    types |= dict.fromkeys(("masks", "root", "covered", "nodes", "parent_rows", "count"), "*i32")
    types |= dict.fromkeys(("n", "layers", "budget"), "i32")
    found = []
    for nodes in NODES:
        for words in WORDS:
            options = shape_options(nodes, words, nodes)
            warps = options.pop("num_warps")
            for ratio in (True, False):
                for limited in (True, False):
                    name = f"select_nodes {'ratio' if ratio else 'throughput'}{' limited' if limited else ''} {nodes}x{words}"
                    constants = options | {"RATIO": ratio, "LIMITED": limited}
                    found.append(Configuration(name, select_kernel, types, constants, warps, fp_fusion=False))
    return found
