"""EAGLE-3 draft head: one decoder layer over (target features, next token), used again on its own states below the root.

A step: attention over `cat(input_layernorm(embedding), hidden_norm(h))`, then the MLP; logits are `lm_head(norm(h'))`, and
the next step's h is the pre-norm h'. The first h of a row is `fc` of the target's captured hidden states.
Source: Li et al., "EAGLE-3: Scaling up Inference Acceleration of LLMs via Training-Time Test", arXiv 2503.01840.

Legend of shapes: N rows, H hidden, D head dim, A heads*D, G key-value heads, g query heads per key-value head, F feature
width, V draft vocabulary, P committed rows, R roots, b beam, t expanded tree rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ecospec_runtime.checkpoint import DTYPES, fingerprint
from ecospec_runtime.config import PoolConfig
from ecospec_runtime.drafters.eagle3_config import HeadConfig, check_fit, checked_map, read_head_config, read_tensors
from ecospec_runtime.drafters.tree import grow
from ecospec_runtime.errors import UserError
from ecospec_runtime.pool import Pool

_CHUNK = 512  # rows of one extension pass
_ELEMENTS = 1 << 24  # largest intermediate of a batched expansion


@dataclass(frozen=True)
class HeadWeights:
    """The head's weights in the form its arithmetic wants: projections concatenated, the query scale folded in."""

    config: HeadConfig
    fc_HF: Tensor
    qkv_AH: Tensor  # [(heads + 2 G) * D, 2H]
    out_HA: Tensor
    gate_up_IH: Tensor
    down_HI: Tensor
    lm_head_VH: Tensor
    input_norm_H: Tensor
    hidden_norm_H: Tensor
    post_norm_H: Tensor
    final_norm_H: Tensor
    feature_norms: tuple[Tensor, ...]  # one over all features, or one per captured layer, or none

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMS norm over the last dimension."""
        return F.rms_norm(x, weight.shape, weight, self.config.eps)

    def fuse(self, features_NF: Tensor) -> Tensor:
        """First state `[N, H]` of a row from the target's features."""
        if self.feature_norms:
            parts = features_NF.split([w.shape[0] for w in self.feature_norms], dim=-1)
            features_NF = torch.cat([self.norm(x, w) for x, w in zip(parts, self.feature_norms, strict=True)], dim=-1)
        return F.linear(features_NF, self.fc_HF)

    def project(self, embed_NH: Tensor, h_NH: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        """Residual `[N, H]`, rotated queries `[N, heads, D]` and keys `[N, G, D]`, values `[N, G, D]`."""
        c = self.config
        normed = self.norm(h_NH, self.hidden_norm_H)
        x = torch.cat((self.norm(embed_NH, self.input_norm_H), normed), dim=-1)
        qkv = F.linear(x, self.qkv_AH).unflatten(-1, (c.heads + 2 * c.kv_heads, c.head_dim))
        rotated, v = qkv.split((c.heads + c.kv_heads, c.kv_heads), dim=-2)
        cos, sin = rope
        rotated = rotated * cos + rotated.roll(c.head_dim // 2, -1) * sin
        q, k = rotated.split((c.heads, c.kv_heads), dim=-2)
        return normed if c.norm_before_residual else h_NH, q, k, v

    def finish(self, residual_NH: Tensor, attended_NA: Tensor) -> Tensor:
        """Output projection, MLP and both residuals: the next state `[N, H]`."""
        h = residual_NH + F.linear(attended_NA, self.out_HA)
        gate, up = F.linear(self.norm(h, self.post_norm_H), self.gate_up_IH).chunk(2, dim=-1)
        return h + F.linear(F.silu(gate) * up, self.down_HI)

    def logits(self, states_NH: Tensor) -> Tensor:
        """Draft-vocabulary logits `[N, V]`, float32."""
        return F.linear(self.norm(states_NH, self.final_norm_H), self.lm_head_VH).float()


def rope_tables(config: HeadConfig, positions: int) -> tuple[Tensor, Tensor]:
    """Cosine and sign-carrying sine `[positions, 1, D]`: x * cos + roll(x, D/2) * sin rotates both halves."""
    frequencies, factor = config.rotary()
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies
    cos, sin = angles.cos() * factor, angles.sin() * factor
    return torch.cat((cos, cos), dim=-1)[:, None], torch.cat((-sin, sin), dim=-1)[:, None]


class Eagle3Head(nn.Module):
    """Parameters of a head under their published names; `weights` gives the form that computes."""

    def __init__(self, config: HeadConfig):
        super().__init__()
        self.config = c = config
        features = len(c.aux_layers) * c.target_hidden_size

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False)

        def norm(width: int) -> nn.RMSNorm:
            return nn.RMSNorm(width, c.eps)

        self.fc = linear(features, c.hidden_size)
        attention = nn.ModuleDict({
            "q_proj": linear(2 * c.hidden_size, c.heads * c.head_dim),
            "k_proj": linear(2 * c.hidden_size, c.kv_heads * c.head_dim),
            "v_proj": linear(2 * c.hidden_size, c.kv_heads * c.head_dim),
            "o_proj": linear(c.heads * c.head_dim, c.hidden_size),
        })
        mlp = nn.ModuleDict({
            "gate_proj": linear(c.hidden_size, c.intermediate_size),
            "up_proj": linear(c.hidden_size, c.intermediate_size),
            "down_proj": linear(c.intermediate_size, c.hidden_size),
        })
        norms = {name: norm(c.hidden_size) for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
        self.midlayer = nn.ModuleDict({"self_attn": attention, "mlp": mlp, **norms})
        self.norm = norm(c.hidden_size)
        self.lm_head = linear(c.hidden_size, c.draft_vocab_size)
        if c.norm_before_fc:
            self.input_norm = norm(features)
        if c.fc_norm:
            self.fc_norm = nn.ModuleList([norm(c.target_hidden_size) for _ in c.aux_layers])
        if c.own_embedding:
            self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)

    def weights(self) -> HeadWeights:
        """The weights to compute with; gradients flow back to the parameters."""
        c, p = self.config, dict(self.named_parameters())
        q, k, v, out = (p[f"midlayer.self_attn.{name}_proj.weight"] for name in "qkvo")
        feature_norms: tuple[Tensor, ...] = ()
        if c.norm_before_fc:
            feature_norms = (p["input_norm.weight"],)
        elif c.fc_norm:
            feature_norms = tuple(p[f"fc_norm.{i}.weight"] for i in range(len(c.aux_layers)))
        return HeadWeights(
            c, p["fc.weight"], torch.cat((q * c.head_dim**-0.5, k, v)), out,
            torch.cat((p["midlayer.mlp.gate_proj.weight"], p["midlayer.mlp.up_proj.weight"])),
            p["midlayer.mlp.down_proj.weight"], p["lm_head.weight"], p["midlayer.input_layernorm.weight"],
            p["midlayer.hidden_norm.weight"], p["midlayer.post_attention_layernorm.weight"], p["norm.weight"],
            feature_norms,
        )  # fmt: skip


@dataclass
class Eagle3Sequence:
    """Committed rows of one sequence. Buffers grow by doubling; only the first `length` rows mean anything."""

    keys: Tensor  # [G, capacity, D]
    values: Tensor  # [G, capacity, D]
    states: Tensor  # [capacity, H] pre-norm state of every row
    tokens: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Number of committed rows."""
        return len(self.tokens)

    def reserve(self, rows: int) -> None:
        """Make room for `rows` rows in all."""
        capacity = self.states.shape[0]
        if rows > capacity:
            extra = max(rows, 2 * capacity) - capacity
            self.keys, self.values = (F.pad(x, (0, 0, 0, extra)) for x in (self.keys, self.values))
            self.states = F.pad(self.states, (0, 0, 0, extra))


class Eagle3Drafter:
    """EAGLE-3 head ready to draft for one target; see `drafters.base.Drafter` for the methods' contract."""

    kind = "eagle3"

    def __init__(
        self, head: Eagle3Head, target_ids_V: Tensor, embedding: Tensor, digest: str, source: str, dtype: torch.dtype
    ):
        """`embedding` [target vocabulary, H] is the head's own or the target's; `target_ids_V` maps draft to target ids."""
        device = embedding.device
        with torch.no_grad():
            self._weights = head.to(device, dtype).requires_grad_(False).weights()
        self.config, self.fingerprint, self.source = head.config, digest, source
        self.width, self.aux_layers = self.config.hidden_size, self.config.aux_layers
        self._target_ids, self._embedding = target_ids_V.to(device), embedding.detach()
        self._dtype, self._device = dtype, device
        self._rope = self._tables(self.config.max_positions)

    def check(self, target: Any) -> None:
        """Raise UserError if the head was made for another hidden size or vocabulary than the target's."""
        check_fit(self.config, target, self.source)

    def start(self) -> Eagle3Sequence:
        """An empty sequence with room for a first few hundred rows."""
        c, kind = self.config, {"dtype": self._dtype, "device": self._device}
        kv = (c.kv_heads, _CHUNK, c.head_dim)
        return Eagle3Sequence(torch.zeros(kv, **kind), torch.zeros(kv, **kind), torch.zeros(_CHUNK, c.hidden_size, **kind))

    @torch.inference_mode()
    def extend(self, sequence: Eagle3Sequence, tokens_m: Tensor | Sequence[int], features_mF: Tensor) -> None:
        """Append m rows; row j pairs the features at position j with the token at position j + 1."""
        tokens = torch.as_tensor(tokens_m, device=self._device)
        if tokens.shape[0] != features_mF.shape[0]:
            raise ValueError(f"{tokens.shape[0]} tokens but {features_mF.shape[0]} feature rows")
        sequence.reserve(sequence.length + tokens.shape[0])
        for begin in range(0, tokens.shape[0], _CHUNK):
            self._append(sequence, tokens[begin : begin + _CHUNK], features_mF[begin : begin + _CHUNK])

    def expand(
        self, sequence: Eagle3Sequence, root_token: int, config: PoolConfig, temperatures: tuple[float, ...] = ()
    ) -> Pool:
        """The pool below `root_token`, which must be the token of the last row."""
        if not sequence.tokens or sequence.tokens[-1] != root_token:
            raise ValueError(f"root token {root_token} is not the token of the last row")
        return self.expand_many(sequence, [sequence.length - 1], config, temperatures)[0]

    @torch.inference_mode()
    def expand_many(
        self, sequence: Eagle3Sequence, roots: list[int], config: PoolConfig, temperatures: tuple[float, ...] = ()
    ) -> list[Pool]:
        """One pool per row index in `roots`; the pool of row r sees rows 0..r only."""
        if roots and not 0 <= min(roots) <= max(roots) < sequence.length:
            raise ValueError(f"roots must be in 0..{sequence.length - 1}")
        rows = config.beam * config.depth
        widest = max(rows * self.config.draft_vocab_size, config.beam * self.config.heads * (sequence.length + rows))
        chunk = max(1, _ELEMENTS // widest)
        pools: list[Pool] = []
        for begin in range(0, len(roots), chunk):
            part = roots[begin : begin + chunk]
            rows_R = torch.tensor(part, device=self._device)
            before = sequence.states[(rows_R - 1).clamp(min=0)] * (rows_R > 0)[:, None]
            step = _TreeStep(self, sequence, rows_R, last_only=part == [sequence.length - 1])
            tokens = [sequence.tokens[r] for r in part]
            pools += grow(
                before, sequence.states[rows_R], tokens, config, temperatures, self._weights.logits, step, self._target_ids
            )
        return pools

    def _append(self, sequence: Eagle3Sequence, tokens_m: Tensor, features_mF: Tensor) -> None:
        """One causal pass over m new rows."""
        w, past, m = self._weights, sequence.length, tokens_m.shape[0]
        total = past + m
        embed = F.embedding(tokens_m, self._embedding).to(self._dtype)
        h = w.fuse(features_mF.to(self._device, self._dtype))
        residual, q, k, v = w.project(embed, h, self.rope(past, total))
        sequence.keys[:, past:total] = k.transpose(0, 1)
        sequence.values[:, past:total] = v.transpose(0, 1)
        scores = self._grouped(q) @ sequence.keys[:, :total].transpose(1, 2)
        if m > 1:
            hidden = torch.ones(m, total, dtype=torch.bool, device=self._device).triu(past + 1)
            scores = scores.view(-1, m, self.config.groups, total).masked_fill_(hidden[:, None], -torch.inf).flatten(1, 2)
        attended = scores.softmax(-1) @ sequence.values[:, :total]
        sequence.states[past:total] = w.finish(residual, self._ungrouped(attended, m))
        sequence.tokens.extend(tokens_m.tolist())

    def _grouped(self, q_NAD: Tensor) -> Tensor:
        """Queries `[N, heads, D]` as `[G, N * g, D]`."""
        return q_NAD.unflatten(1, (self.config.kv_heads, -1)).transpose(0, 1).flatten(1, 2)

    def _ungrouped(self, attended: Tensor, rows: int) -> Tensor:
        """Attention output `[G, N * g, D]` as `[N, A]`."""
        return attended.view(self.config.kv_heads, rows, -1, self.config.head_dim).transpose(0, 1).flatten(1)

    def rope(self, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Rotation of positions begin..end-1; the tables double when a sequence outgrows them."""
        if end > self._rope[0].shape[0]:
            self._rope = self._tables(max(end, 2 * self._rope[0].shape[0]))
        return self._rope[0][begin:end], self._rope[1][begin:end]

    def _tables(self, positions: int) -> tuple[Tensor, Tensor]:
        cos, sin = rope_tables(self.config, positions)
        return cos.to(self._device, self._dtype), sin.to(self._device, self._dtype)


class _TreeStep:
    """One level of R trees at once: attention over each root's committed rows and over the node's own path."""

    def __init__(self, drafter: Eagle3Drafter, sequence: Eagle3Sequence, rows_R: Tensor, last_only: bool):
        self.drafter, self.rows, self.last_only = drafter, rows_R, last_only
        length = sequence.length if last_only else int(rows_R.max()) + 1
        self.keys, self.values = sequence.keys[:, :length], sequence.values[:, :length]
        self.tree_keys: list[Tensor] = []  # per level [G, R, b, D]
        self.tree_values: list[Tensor] = []
        self.hidden_RP = torch.arange(length, device=rows_R.device) > rows_R[:, None]

    def __call__(self, level: int, ids_N: Tensor, h_NH: Tensor, ancestors: Tensor) -> Tensor:
        """States `[N, H]` after the tokens `ids_N` (draft ids) on the states that proposed them."""
        d, roots = self.drafter, self.rows.shape[0]
        embed = F.embedding(d._target_ids[ids_N], d._embedding).to(d._dtype)
        residual, q, k, v = d._weights.project(embed, h_NH, self._rotation(level, ids_N.shape[0] // roots))
        for x, store in ((k, self.tree_keys), (v, self.tree_values)):
            store.append(x.transpose(0, 1).unflatten(1, (roots, -1)))
        attended = self._attend(d._grouped(q), ancestors)
        return d._weights.finish(residual, d._ungrouped(attended, ids_N.shape[0]))

    def _rotation(self, level: int, beam: int) -> tuple[Tensor, Tensor]:
        """Tables for nodes at depth `level` below each root; root row r sits at position r."""
        if self.last_only:
            position = self.keys.shape[1] - 1 + level
            return self.drafter.rope(position, position + 1)
        cos, sin = self.drafter.rope(0, self.keys.shape[1] + level)
        positions = (self.rows + level).repeat_interleave(beam)
        return cos[positions], sin[positions]

    def _attend(self, q: Tensor, ancestors_Rbt: Tensor) -> Tensor:
        """Attention `[G, R * b * g, D]` of queries in that layout."""
        groups, roots = self.drafter.config.groups, self.rows.shape[0]
        past = self.keys.shape[1]
        keys, values = torch.cat(self.tree_keys, dim=2), torch.cat(self.tree_values, dim=2)
        committed = (q @ self.keys.transpose(1, 2)).unflatten(1, (roots, -1))
        if not self.last_only:
            committed.masked_fill_(self.hidden_RP[:, None], -torch.inf)
        own = q.unflatten(1, (roots, -1)) @ keys.transpose(2, 3)
        own = own.masked_fill_(~ancestors_Rbt.repeat_interleave(groups, dim=1), -torch.inf)
        weights = torch.cat((committed, own), dim=-1).softmax(-1)
        attended = weights[..., :past].flatten(1, 2) @ self.values
        return attended + (weights[..., past:] @ values).flatten(1, 2)


def load_eagle3(folder: Path, source: str, target: Any, dtype: str = "auto") -> Eagle3Drafter:
    """Load a head in the flat published layout for a target. Raises UserError naming the file, tensor or key at fault.

    `dtype` auto computes in float32 on a CPU (faster there for a few rows) and as saved elsewhere.
    """
    tensors = read_tensors(folder)
    config = read_head_config(folder, target, tensors)
    check_fit(config, target, source)
    target_ids = checked_map(config, tensors, source)
    head = Eagle3Head(config)
    fill(head, {name: value for name, value in tensors.items() if name not in ("d2t", "t2d")}, source)
    saved = tensors["fc.weight"].dtype
    wanted = DTYPES[dtype]
    if not isinstance(wanted, torch.dtype):
        wanted = torch.float32 if target.device.type == "cpu" else saved
    shared = target.model.get_input_embeddings().weight
    own = head.embed_tokens.weight.to(shared.device, wanted) if config.own_embedding else None
    return Eagle3Drafter(head, target_ids, shared if own is None else own, fingerprint(folder), source, wanted)


def fill(head: Eagle3Head, tensors: dict[str, Tensor], source: str) -> None:
    """Copy tensors into a head; raises UserError naming the first one that is missing, unknown or misshapen."""
    expected = head.state_dict()
    missing, unknown = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    if missing:
        raise UserError(f"{source}: tensor {missing[0]} is missing ({len(missing)} in all); the checkpoint is not complete")
    if unknown:
        raise UserError(f"{source}: tensor {unknown[0]} is not part of an EAGLE-3 head; this variant is not supported")
    for name, value in tensors.items():
        if value.shape != expected[name].shape:
            raise UserError(
                f"{source}: tensor {name} has shape {list(value.shape)}, config.json asks for {list(expected[name].shape)}"
            )
    head.load_state_dict(tensors)
