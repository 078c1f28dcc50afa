"""EAGLE-3 drafting: against a naive recomputation, and the promises that pools and sequences keep."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ecospec_kernels import dispatch
from ecospec_runtime.config import PoolConfig
from ecospec_runtime.drafters import load_drafter
from ecospec_runtime.drafters.eagle3 import Eagle3Drafter
from ecospec_runtime.pool import Pool
from ecospec_runtime.target import Target
from tests.heads import biases, edit_head, norms, wider
from tests.pools import check_noise

ROWS = 90  # more than one extension pass
NODES = ("tokens", "parents", "depths", "ranks", "log_probs", "state_rows")
VARIANTS = ["plain", "norm_before_residual", "norm_before_fc", "fc_norm", "aux_norms", "own_embedding", "norm_output",
            "qkv_bias", "all_biases", "everything", "wider"]  # fmt: skip


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return Target.from_pretrained(tiny_target_dir, dtype="float32")


@pytest.fixture(scope="module")
def drafter(tiny_drafter_dir: Path, target: Target) -> Eagle3Drafter:
    loaded = load_drafter(tiny_drafter_dir, target)
    assert isinstance(loaded, Eagle3Drafter)
    return loaded


def rows(count: int = ROWS) -> tuple[Tensor, Tensor]:
    """Tokens and features of a made-up text."""
    generator = torch.Generator().manual_seed(7)
    return torch.randint(1, 96, (count,), generator=generator), torch.randn(count, 96, generator=generator)


@pytest.fixture(scope="module")
def whole(drafter: Eagle3Drafter) -> Any:
    """A sequence extended over all rows at once."""
    sequence = drafter.start()
    drafter.extend(sequence, *rows())
    return sequence


def same(left: Pool, right: Pool) -> None:
    """Bit for bit the same pool."""
    for name in (*NODES, "states", "entropies", "log_normalizers"):
        np.testing.assert_array_equal(getattr(left, name), getattr(right, name), err_msg=name)
    assert left.root_token == right.root_token


# --- a naive head: no cache, no trees, every row of a path recomputed ---------------------------------------------------


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def naive_states(w: dict[str, Tensor], config: dict[str, Any], embedding: Tensor, tokens: Tensor, features: Tensor,
                 path: list[int]) -> Tensor:  # fmt: skip
    """States of all rows and of a drafted path after them, one row at a time from first principles.

    Pre-norm states, or with `norm_output` post-norm ones.
    """
    if "input_norm.weight" in w:
        features = _rms(features, w["input_norm.weight"])
    if "fc_norm.0.weight" in w:
        features = torch.cat([_rms(x, w[f"fc_norm.{i}.weight"]) for i, x in enumerate(features.chunk(3, -1))], -1)
    fused = features @ w["fc.weight"].T
    keys: list[Tensor] = []
    values: list[Tensor] = []
    states: list[Tensor] = []
    frequencies = 10000.0 ** (-torch.arange(0, 8, 2) / 8)
    for position, token in enumerate([*tokens.tolist(), *path]):
        h = fused[position] if position < len(tokens) else states[-1]
        normed = _rms(h, w["midlayer.hidden_norm.weight"])
        x = torch.cat((_rms(embedding[token], w["midlayer.input_layernorm.weight"]), normed))
        bias = {n: w.get(f"midlayer.self_attn.{n}_proj.bias", torch.zeros(1)) for n in "qkvo"}
        q, k, v = ((w[f"midlayer.self_attn.{n}_proj.weight"] @ x + bias[n]).view(-1, 8) for n in "qkv")
        turn = torch.polar(torch.ones(4), position * frequencies)
        q, k = (torch.view_as_real(torch.complex(y[:, :4], y[:, 4:]) * turn).transpose(1, 2).flatten(1) for y in (q, k))
        keys.append(k)
        values.append(v)
        out = []
        for head in range(4):
            scores = torch.stack([q[head] @ key[head // 2] for key in keys]) / 8**0.5
            out.append(scores.softmax(0) @ torch.stack([value[head // 2] for value in values]))
        h = normed if config.get("norm_before_residual") else h
        h = h + w["midlayer.self_attn.o_proj.weight"] @ torch.cat(out) + bias["o"]
        x = _rms(h, w["midlayer.post_attention_layernorm.weight"])
        gate, up = w["midlayer.mlp.gate_proj.weight"] @ x, w["midlayer.mlp.up_proj.weight"] @ x
        h = h + w["midlayer.mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up)
        states.append(_rms(h, w["norm.weight"]) if config.get("norm_output") else h)
    return torch.stack(states)


def variant(folder: Path, out: Path, name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Write a head with optional parts and return its tensors (new names) and config."""
    tensors: dict[str, Tensor] = {}
    config: dict[str, Any] = {}

    def edit(written: dict[str, Tensor], settings: dict[str, Any]) -> None:
        for switch in ("norm_before_residual", "norm_output"):
            if name in (switch, "everything"):
                settings[switch] = True
        if name in ("norm_before_fc", "everything"):
            written["input_norm.weight"] = norms(96, 11)
        if name in ("fc_norm", "aux_norms"):
            written |= {f"fc_norm.{i}.weight": norms(32, 12 + i) for i in range(3)}
        if name in ("own_embedding", "everything"):
            written["embed_tokens.weight"] = torch.randn(96, 32, generator=torch.Generator().manual_seed(15))
        if name in ("qkv_bias", "all_biases", "everything"):
            settings["attention_bias"] = True
            biases(written, "qkv" if name == "qkv_bias" else "qkvo")
        if name == "wider":
            wider(written, settings)
        tensors.update(written)
        config.update(settings)
        if name == "aux_norms":
            for i, old in enumerate(("low", "mid", "high")):
                written[f"aux_norm_{old}.weight"] = written.pop(f"fc_norm.{i}.weight")

    edit_head(folder, out, edit)
    return tensors, config


def test_a_pool_guesses_the_draw(tiny_drafter_dir: Path, target: Target) -> None:
    drafter, (tokens, features) = load_drafter(tiny_drafter_dir, target), rows(9)
    sequence = drafter.start()
    drafter.extend(sequence, tokens, features)
    check_noise(drafter, sequence, tokens.tolist())


@pytest.mark.parametrize("name", VARIANTS)
def test_pools_match_a_naive_recomputation(tiny_drafter_dir: Path, tmp_path: Path, target: Target, name: str) -> None:
    """In the flat layout; `test_eagle3_layouts.py` holds the other one to the same pools."""
    tensors, config = variant(tiny_drafter_dir, tmp_path / "head", name)
    shared = target.model.get_input_embeddings().weight.detach()
    drafter: Any = load_drafter(tmp_path / "head", target)
    tokens, features = rows(9)
    sequence, pieces, calls = drafter.start(), drafter.start(), Counter(dispatch.CALLS)
    drafter.extend(sequence, tokens, features)
    pool = drafter.expand(sequence, int(tokens[-1]), PoolConfig(depth=3, beam=2, width=4), temperatures=(0.5,))
    if drafter._kernels:
        ran = dispatch.CALLS - calls
        assert set(ran) == {("draft_rows", "cpu"), ("draft_tree", "cpu")}
        for i in range(9):
            drafter.extend(pieces, tokens[i : i + 1], features[i : i + 1])
        assert torch.equal(pieces.states[:9], sequence.states[:9])
    embedding = tensors.get("embed_tokens.weight", shared)
    ids = tensors["d2t"] + torch.arange(48)
    for node in range(len(pool)):
        path: list[int] = []
        at = int(pool.parents[node])
        while at >= 0:
            path.insert(0, int(pool.tokens[at]))
            at = int(pool.parents[at])
        states = naive_states(tensors, config, embedding, tokens, features, path)
        state = states[-1] if config.get("norm_output") else _rms(states[-1], tensors["norm.weight"])
        logits = tensors["lm_head.weight"] @ state
        log_probs = logits.log_softmax(0)
        row = pool.state_rows[node]
        place = int((ids == pool.tokens[node]).nonzero())
        torch.testing.assert_close(torch.from_numpy(pool.states[row]), states[-1], rtol=1e-4, atol=1e-4)
        assert pool.log_probs[node] == pytest.approx(float(log_probs[place]), abs=1e-3)
        assert pool.ranks[node] == int((log_probs > log_probs[place]).sum())
        assert pool.entropies[row] == pytest.approx(float(torch.special.entr(log_probs.exp()).sum()), abs=1e-3)
        normalizer = float((log_probs / 0.5).logsumexp(0))
        assert pool.log_normalizers[row, 0] == pytest.approx(normalizer, abs=1e-3)
    before = naive_states(tensors, config, embedding, tokens, features, [])[-2]
    torch.testing.assert_close(torch.from_numpy(pool.states[0]), before, rtol=1e-4, atol=1e-4)


shapes = st.builds(PoolConfig, depth=st.integers(1, 5), beam=st.integers(1, 5), width=st.integers(1, 9))


@settings(max_examples=25, deadline=None)
@given(config=shapes, root=st.integers(0, ROWS - 1))
def test_pools_are_well_formed(drafter: Eagle3Drafter, whole: Any, config: PoolConfig, root: int) -> None:
    pool = drafter.expand_many(whole, [root], config, (0.5, 1.0))[0]
    width, beam = config.width, min(config.beam, config.width)
    assert (pool.parents[pool.depths == 1] == -1).all()
    for level in range(1, config.depth + 1):
        assert (pool.depths == level).sum() == (width if level == 1 else min(width, beam * width))
    reach = np.empty(len(pool))
    for i, parent in enumerate(pool.parents.tolist()):
        assert parent < i
        assert pool.depths[i] == (pool.depths[parent] + 1 if parent >= 0 else 1)
        reach[i] = pool.log_probs[i] + (reach[parent] if parent >= 0 else 0.0)
        siblings = np.flatnonzero(pool.parents[:i] == parent)
        assert pool.ranks[i] == len(siblings)
        assert (pool.log_probs[siblings] >= pool.log_probs[i]).all()
        assert (pool.state_rows[siblings] == pool.state_rows[i]).all()
        assert pool.tokens[i] not in pool.tokens[siblings]
    for level in range(1, config.depth + 1):
        assert (np.diff(reach[pool.depths == level]) <= 1e-6).all()
    assert len(pool.states) == len(pool.entropies) == len(pool.log_normalizers) == 2 + beam * (config.depth - 1)
    np.testing.assert_allclose(pool.log_normalizers[:, 1], 0.0, atol=1e-5)
    if root == 0:
        assert not pool.states[0].any()


@settings(max_examples=20, deadline=None)
@given(config=shapes, depth=st.integers(1, 5))
def test_a_cut_pool_is_the_pool_of_that_depth(
    drafter: Eagle3Drafter, whole: Any, config: PoolConfig, depth: int
) -> None:
    full = drafter.expand_many(whole, [40], config)[0]
    live = drafter.expand_many(whole, [40], config.cut(depth))[0]
    n = len(live)
    assert n == int((full.depths <= depth).sum())
    for name in NODES:
        np.testing.assert_array_equal(getattr(full, name)[:n], getattr(live, name), err_msg=name)
    np.testing.assert_array_equal(full.states[: len(live.states)], live.states)


@settings(max_examples=20, deadline=None)
@given(config=shapes, min_reach=st.floats(1e-4, 0.9))
def test_a_pool_cut_at_a_reach_is_what_the_full_pool_holds_from_there_up(
    drafter: Eagle3Drafter, whole: Any, config: PoolConfig, min_reach: float
) -> None:
    full = drafter.expand_many(whole, [40], config)[0]
    live = drafter.expand_many(whole, [40], config.cut(None, min_reach))[0]
    reach = full.log_probs.copy()
    for i, parent in enumerate(full.parents.tolist()):
        reach[i] += reach[parent] if parent >= 0 else 0.0
    kept = np.flatnonzero(reach >= np.log(np.float32(min_reach)))
    for name in ("tokens", "depths", "ranks", "log_probs"):
        np.testing.assert_array_equal(getattr(full, name)[kept], getattr(live, name), err_msg=name)
    np.testing.assert_array_equal(full.tokens[full.parents[kept]], live_parents(full, live))
    for name in ("states", "entropies"):
        there, here = getattr(full, name)[full.state_rows[kept]], getattr(live, name)[live.state_rows]
        np.testing.assert_array_equal(there, here, err_msg=name)
    deepest = int(live.depths.max(initial=0))
    assert live.levels == min(config.depth, deepest + 1)  # one level is paid for to learn that it keeps nothing
    expanded = [min(config.beam, int((live.depths == d).sum())) for d in range(1, live.levels)]
    assert live.expanded == sum(expanded)  # no node that is left out


def live_parents(full: Pool, live: Pool) -> np.ndarray:
    """Tokens of the parents; a child of the root shows what index -1 shows in `full`."""
    return np.where(live.parents < 0, full.tokens[-1], live.tokens[live.parents]) if len(live) else live.tokens


@settings(max_examples=10, deadline=None)
@given(pieces=st.lists(st.integers(1, 80), min_size=1, max_size=8))
def test_catching_up_in_pieces_equals_one_extension(drafter: Eagle3Drafter, whole: Any, pieces: list[int]) -> None:
    """Along accepted paths, with a tree drafted and dropped after each; also: many roots at once equal one at a time."""
    tokens, features = rows()
    config = PoolConfig(depth=3, beam=2, width=3)
    sequence, done, live, roots = drafter.start(), 0, [], []
    for piece in pieces:
        end = min(ROWS, done + piece)
        drafter.extend(sequence, tokens[done:end], features[done:end])
        live.append(drafter.expand(sequence, int(tokens[end - 1]), config))
        roots.append(end - 1)
        done = end
    for pool, harvested in zip(live, drafter.expand_many(whole, roots, config), strict=True):
        if drafter._kernels:
            same(pool, harvested)
        else:
            np.testing.assert_array_equal(pool.tokens, harvested.tokens)
            np.testing.assert_allclose(pool.states, harvested.states, atol=1e-4)


def test_sequences_and_rotation_outgrow_their_buffers(drafter: Eagle3Drafter) -> None:
    tokens, features = rows(2100)  # buffers start at 512 rows, rotation tables at 2048 positions
    grown, config = drafter.start(), PoolConfig(depth=2, beam=2, width=3)
    for begin in range(0, 2100, 300):
        drafter.extend(grown, tokens[begin : begin + 300], features[begin : begin + 300])
    assert grown.length == 2100
    at_once = drafter.start()
    drafter.extend(at_once, tokens, features)
    np.testing.assert_array_equal(
        drafter.expand(grown, int(tokens[-1]), config).tokens, drafter.expand_many(at_once, [2099], config)[0].tokens
    )


def test_misuse_is_an_error(drafter: Eagle3Drafter, whole: Any) -> None:
    with pytest.raises(ValueError, match="last row"):
        drafter.expand(whole, int(rows()[0][-1]) + 1, PoolConfig())
    with pytest.raises(ValueError, match="roots"):
        drafter.expand_many(whole, [ROWS], PoolConfig())
    with pytest.raises(ValueError, match="feature rows"):
        drafter.extend(drafter.start(), torch.tensor([1, 2]), torch.zeros(3, 96))


def test_bfloat16_storage_changes_only_the_rounding_of_weights(tiny_drafter_dir: Path, target: Target) -> None:
    exact, rounded = (load_drafter(tiny_drafter_dir, target, dtype) for dtype in ("float32", "bfloat16"))
    pools = []
    for each in (exact, rounded):
        sequence = each.start()
        each.extend(sequence, *rows(20))
        pools.append(each.expand(sequence, int(rows(20)[0][-1]), PoolConfig(depth=1, width=4)))
    assert pools[1].states.dtype == np.float32
    assert not np.array_equal(pools[0].states, pools[1].states)
    np.testing.assert_allclose(pools[0].states, pools[1].states, atol=0.3)
