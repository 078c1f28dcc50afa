"""Cases of the ops around a pass: predict, select, draw, verify, commit."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.case import BF16, FP16, FP32, ROUNDING, Case, Device, Inputs, Work, draw, equal, near
from bench.models import MODELS, PREDICTOR_WIDTH, ROWS, Model
from ecospec_kernels.bitsets import pack, unpack, words_for
from ecospec_kernels.commit_path import reference as commit
from ecospec_kernels.draw_rows import reference as draws
from ecospec_kernels.expert_predictor import fused as predictor_fused
from ecospec_kernels.expert_predictor import reference as predictor
from ecospec_kernels.select_nodes import reference as select
from ecospec_kernels.verify_tree import reference as verify

POOL = 64  # nodes of the largest pool whose rows the kernels take
ACCEPTED = 4  # rows that move, of a pass
INT32 = torch.int32


# expert_predictor


def check_prediction(result: Tensor, expected: Tensor, inputs: Inputs) -> None:
    """Sets of the right size, that differ only by experts as likely as the last one taken, but for the order of a sum."""
    hidden, head, bias, top_k, shrinkage, output = inputs
    if output != "masks":
        near(hidden.size(1))(result, expected, inputs)
        return
    mine, theirs = (unpack(words)[..., : head.size(1)] for words in (result, expected))
    assert (mine.sum(-1) == top_k).all(), "a set is not of top_k experts"
    logits = predictor.expert_predictor(hidden, head, bias, top_k, shrinkage, "logits")
    odd = ~logits.isfinite().all(-1)
    assert torch.equal(mine[odd], theirs[odd]), "sets of unknown rows differ"
    last = logits.topk(top_k, dim=-1).values[..., -1:]
    off = ((logits - last).abs() * (mine ^ theirs))[~odd]
    assert float(off.max()) <= 1e-5 * float(logits[~odd].abs().max()), f"an expert is off by {float(off.max()):.1e}"


def top_masks(hidden: Tensor, head: Tensor, bias: Tensor, top_k: int, *_: Any) -> Tensor:
    """What one writes without a kernel: a product, torch's top-k, and packing."""
    logits = F.linear(hidden, head.flatten(0, 1), bias.flatten()).unflatten(-1, bias.shape)
    chosen = logits.topk(top_k, dim=-1).indices
    return pack(torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, chosen, True))


def predictor_work(n: int, layers: int, experts: int, width: int) -> Work:
    """The head is loaded once per tile of rows, a row of hidden by every layer (the first two once more for each)."""
    head, hidden = layers * experts * (width + 1) * 4, n * width * 4
    out = n * layers * words_for(experts) * 4
    tiles = -(-n // predictor_fused.form(experts).R)
    again = (layers - 1) * hidden + 4 * layers * tiles * width * 4
    return Work(head + hidden + out, head + hidden + out, (tiles - 1) * head + again,
                float32=2 * n * layers * experts * width)  # fmt: skip


def _predict(model: str, n: int, layers: int, experts: int, width: int, top_k: int, output: str, shrinkage: float, odd: bool) -> Case:  # fmt: skip
    def make(device: Device) -> Inputs:
        hidden = draw(device, 1, n, width)
        if odd and n > 2:
            hidden[2, 0] = torch.nan
        head, bias = draw(device, 2, layers, experts, width, scale=width**-0.5), draw(device, 3, layers, experts)
        return hidden, head, bias, top_k, shrinkage, output

    shape = f"{n} rows, {layers} layers of {experts}, width {width}, {output}"
    timed = None if odd else predictor_work(n, layers, experts, width)
    baselines = {} if odd else {"linear, topk": top_masks}  # it does not shrink, nor does what is timed
    return Case("expert_predictor", model, shape, make, check_prediction, timed, baselines)


# select_nodes


def select_work(nodes: int, layers: int, experts: int, budget: int) -> Work:
    """Sets, reach and parents once; at most all sets again in every round (only open nodes' are), from the first-level cache."""
    sets, root = nodes * layers * words_for(experts) * 4, layers * words_for(experts) * 4
    once = sets + root + nodes * 12 + budget * 8 + 44
    return Work(once, once + root, budget * (sets + 3 * root))


def _pool(nodes: int, layers: int, experts: int, top_k: int, device: Device) -> Inputs:
    """A random tree whose reach falls along paths, and sets of top_k experts for its nodes and the root."""
    generator = torch.Generator().manual_seed(nodes + layers)
    parents = torch.tensor([int(torch.randint(-1, i, (1,), generator=generator)) if i else -1 for i in range(nodes)])
    reach = torch.rand(nodes, generator=generator)
    for i, parent in enumerate(parents.tolist()):
        reach[i] *= reach[parent] if parent >= 0 else 1.0
    members = torch.zeros(1 + nodes, layers, experts, dtype=torch.bool)
    chosen = torch.rand(members.shape, generator=generator).topk(top_k, dim=-1).indices
    words = pack(members.scatter_(-1, chosen, True))
    return tuple(t.to(device) for t in (reach, parents, words[1:].contiguous(), words[0].contiguous()))


def _select(model: str, nodes: int, layers: int, experts: int, top_k: int, budget: int, kind: str, capacity: int | None = None) -> Case:  # fmt: skip
    def make(device: Device) -> Inputs:
        if kind == "ratio":
            rule = select.ratio(1.0, layers, capacity, 0.7, device)
        else:
            rule = select.throughput(0.001, 0.02 / layers / top_k, 0.0, capacity, 0.7, device)
        return *_pool(nodes, layers, experts, top_k, device), rule, budget

    limited = f", capacity {capacity}" if capacity else ""
    shape = f"{budget} of {nodes} nodes, {layers} layers of {experts}, {kind}{limited}"
    timed = None if model == "odd" else select_work(nodes, layers, experts, budget)
    baselines = {} if model == "odd" else {"reference": select.select_nodes}
    return Case("select_nodes", model, shape, make, equal, timed, baselines)


# argmax_rows, draw_rows


def check_draw(result: Tensor, expected: Tensor, inputs: Inputs) -> None:
    """The token whose sum is largest, or one as large up to what logs of other libraries change."""
    logits, positions, seed, temperature = inputs
    noise = draws.gumbels(draws.noise_bits(positions, seed, torch.arange(logits.size(1), device=logits.device)))
    sums = logits.float() + temperature * noise
    error = 2 * (temperature * draws.noise_error(noise) + sums.abs() * ROUNDING[FP32]).max(1).values
    lost = sums.max(1).values - sums.gather(1, result[:, None])[:, 0]
    assert result.shape == expected.shape and (lost <= error).all(), (
        f"a token is {float(lost.max()):.1e} below the best"
    )


def _logits(n: int, vocabulary: int, dtype: torch.dtype, device: Device) -> Tensor:
    """Rounded, so that the largest tie; the last row is -inf but for one."""
    logits = draw(device, n, n, vocabulary, scale=3.0).mul_(4).round_().div_(4)
    if n > 1:
        logits[-1, 1:] = -torch.inf
    return logits.to(dtype)


def _argmax(model: str, n: int, vocabulary: int, dtype: torch.dtype) -> Case:
    size = n * vocabulary * dtype.itemsize
    return Case("argmax_rows", model, f"{n} rows of {vocabulary}, {str(dtype)[6:]}", lambda device: (_logits(n, vocabulary, dtype, device),),
                equal, None if model == "odd" else Work(size + 8 * n, size + 8 * n), {"torch.argmax": lambda x: x.argmax(-1)})  # fmt: skip


def _draw(model: str, n: int, vocabulary: int, dtype: torch.dtype) -> Case:
    def make(device: Device) -> Inputs:
        seed, warmth = torch.tensor([7], device=device), torch.tensor([0.7], device=device)
        return _logits(n, vocabulary, dtype, device), torch.arange(n, device=device) + 99, seed, warmth

    size = n * vocabulary * dtype.itemsize + 16 * n
    return Case("draw_rows", model, f"{n} rows of {vocabulary}, {str(dtype)[6:]}", make, check_draw,
                None if model == "odd" else Work(size, size), {"reference": draws.draw_rows})  # fmt: skip


# verify_tree, commit_path


def _verify(model: str, n: int, accepted: int) -> Case:
    """A chain in front, then siblings; the first `accepted` tokens are right."""

    def make(device: Device) -> Inputs:
        following = torch.arange(1, n + 2)
        following[accepted] = 0
        parents = torch.arange(n)
        parents[n // 2 :] = 0
        return tuple(t.to(device) for t in (following, torch.arange(1, n + 1), parents))

    size = 16 * n + 8 * (accepted + 1) + 12 * (n + 1) + 12  # the walk looks up the rows that it accepts
    return Case("verify_tree", model, f"{n} nodes, {accepted} accepted", make, equal, None if model == "odd" else Work(size, size),
                {} if model == "odd" else {"reference": verify.verify_tree})  # fmt: skip


def check_cache(result: Any, expected: Any, inputs: Inputs) -> None:
    """The new length, and rows up to it, bit for bit; what lies behind is rubbish."""
    length = int(expected[0])
    equal(
        (result[0], *(t[:, :length] for t in result[1:])), (expected[0], *(t[:, :length] for t in expected[1:])), inputs
    )


def _commit(model: str, groups: int, width: int, value_width: int, past: int, rows: int, kept: list[int], dtype: torch.dtype) -> Case:  # fmt: skip
    def make(device: Device) -> Inputs:
        keys, values = (
            draw(device, i, groups, past + rows, dim, dtype=dtype) for i, dim in enumerate((width, value_width))
        )
        places = torch.tensor(kept + [-1] * (rows - len(kept)), dtype=INT32, device=device)
        return (
            keys,
            values,
            places,
            torch.tensor([len(kept)], dtype=INT32, device=device),
            torch.tensor([past], device=device),
        )

    moving = sum(row != i for i, row in enumerate(kept))
    size = 2 * moving * groups * (width + value_width) * dtype.itemsize + 4 * rows + 20
    shape = f"{moving} of {rows} rows move, {groups} heads of {width}/{value_width}, {str(dtype)[6:]}"
    return Case("commit_path", model, shape, make, check_cache, None if model == "odd" else Work(size, size),
                {} if model == "odd" else {"index_select, index_copy": commit.commit_path}, writes=(0, 1))  # fmt: skip


def _real(model: Model) -> list[Case]:
    found = [
        _predict(model.name, 1 + POOL, model.layers, model.experts, PREDICTOR_WIDTH, model.top_k, "masks", 0.0, False)
    ]
    found += [_select(model.name, POOL, model.layers, model.experts, model.top_k, budget, kind)
              for budget, kind in ((16, "throughput"), (POOL, "throughput"), (POOL, "ratio"))]  # fmt: skip
    for n in ROWS:
        found += [_argmax(model.name, n, model.vocabulary, BF16), _draw(model.name, n, model.vocabulary, BF16)]
    found.append(_verify(model.name, POOL - 1, ACCEPTED))
    kept = [0, *range(2, 2 * ACCEPTED + 1, 2)]
    found.append(_commit(model.name, model.groups, model.width, model.value_width, 1024, 64, kept, BF16))
    return found


def cases() -> list[Case]:
    """Odd sizes; then the real ones."""
    return [
        _predict("odd", 1, 1, 6, 20, 1, "masks", 0.5, True),
        _predict("odd", 17, 3, 60, 75, 4, "masks", 0.25, True),
        _predict("odd", 5, 2, 128, 40, 8, "logits", 0.5, True),
        _predict("odd", 3, 2, 256, 33, 8, "probabilities", 0.0, True),
        _select("odd", 1, 1, 6, 2, 1, "ratio"),
        _select("odd", 9, 58, 60, 4, 5, "throughput"),
        _select("odd", 9, 3, 128, 8, 5, "ratio", 9),
        _select("odd", 63, 2, 256, 8, 4, "throughput", 12),
        _argmax("odd", 1, 3, FP32),
        _argmax("odd", 3, 16389, BF16),
        _argmax("odd", 4, 100, FP16),
        _draw("odd", 1, 3, FP32),
        _draw("odd", 3, 16389, BF16),
        _verify("odd", 1, 0),
        _verify("odd", 63, 20),
        _verify("odd", 100, 7),
        _commit("odd", 2, 5, 2, 3, 9, [0, 1, 4, 8], FP32),
        _commit("odd", 1, 192, 128, 5, 100, list(range(0, 100, 3)), BF16),
        _commit("odd", 3, 64, 64, 0, 3, [0, 2], FP16),
        *(case for model in MODELS for case in _real(model)),
    ]
