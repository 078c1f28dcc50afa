"""EAGLE-3 draft head: one decoder layer over (target features, next token), used again on its own states below the root.

The first h of a row is `fc` of the target's captured hidden states; the layer (see `ecospec_kernels.draft_layer`) gives the
next h; logits are `lm_head(norm(h))`, and what feeds on is the pre-norm h, or `norm(h)` in a head with `norm_output`.
Source: Li et al., "EAGLE-3: Scaling up Inference Acceleration of LLMs via Training-Time Test", arXiv 2503.01840.

Legend of shapes: m rows, H hidden, D head dim, G key-value heads, F feature width, V draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ecospec_kernels import dispatch
from ecospec_kernels.draft_layer.reference import LayerWeights, Rope, linear
from ecospec_kernels.draft_rows.reference import RowWeights, normed
from ecospec_kernels.draft_tree.reference import Shape, Tree, TreeWeights
from ecospec_runtime.checkpoint import DTYPES, fingerprint
from ecospec_runtime.config import PoolConfig
from ecospec_runtime.drafters.base import TreeDrafter, shared_noise
from ecospec_runtime.drafters.eagle3_config import (
    HeadConfig,
    check_fit,
    check_tokenizer,
    checked_map,
    read_head_config,
    read_tensors,
)
from ecospec_runtime.errors import UserError
from ecospec_runtime.placement import whole_weight
from ecospec_runtime.pool import Pool
from ecospec_runtime.sampling import Sampler

_ROOM = 512  # rows of a new sequence's buffers


@dataclass(frozen=True)
class HeadWeights:
    """The head's weights in the form that computes. Matrices may be stored in bf16 while everything else is float32."""

    layer: LayerWeights
    fc_HF: Tensor
    lm_head_VH: Tensor
    final_norm_H: Tensor | None  # None: the layer's states are normed already
    feature_norms: tuple[Tensor, ...]  # one over all features, or one per captured layer, or none

    def fuse(self, features_mF: Tensor) -> Tensor:
        """First h `[..., m, H]` of rows from the target's features."""
        return linear(normed(features_mF, self.feature_norms, self.layer), self.fc_HF)

    def logits(self, states: Tensor) -> Tensor:
        """Draft-vocabulary logits `[..., m, V]`."""
        normed = states if self.final_norm_H is None else self.layer.norm(states, self.final_norm_H)
        return linear(normed, self.lm_head_VH)

    def stored(self, matrices: torch.dtype, rows: torch.dtype, device: torch.device) -> HeadWeights:
        """Detached copy with matrices and everything else in these types."""

        def convert(value: Any) -> Any:
            return (
                None
                if value is None
                else value.detach().to(device, matrices if value.dim() == 2 else rows).contiguous()
            )

        names = ("qkv", "out", "gate_up", "down", "input_norm", "hidden_norm", "post_norm", "qkv_bias", "out_bias",
                 "output_norm")  # fmt: skip
        layer = replace(self.layer, **{name: convert(getattr(self.layer, name)) for name in names})
        norms = tuple(convert(w) for w in self.feature_norms)
        return HeadWeights(layer, convert(self.fc_HF), convert(self.lm_head_VH), convert(self.final_norm_H), norms)


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

        def linear(inputs: int, outputs: int, bias: bool = False) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias)

        def norm(width: int) -> nn.RMSNorm:
            return nn.RMSNorm(width, c.eps)

        self.fc = linear(features, c.hidden_size)
        heads = {"q": c.heads, "k": c.kv_heads, "v": c.kv_heads}
        attention = {f"{name}_proj": linear(2 * c.hidden_size, n * c.head_dim, c.qkv_bias) for name, n in heads.items()}
        attention["o_proj"] = linear(c.heads * c.head_dim, c.hidden_size, c.out_bias)
        mlp = {f"{name}_proj": linear(c.hidden_size, c.intermediate_size) for name in ("gate", "up")}
        mlp["down_proj"] = linear(c.intermediate_size, c.hidden_size)
        norms = {name: norm(c.hidden_size) for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
        self.midlayer = nn.ModuleDict({"self_attn": nn.ModuleDict(attention), "mlp": nn.ModuleDict(mlp), **norms})
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
        biases: list[Tensor] = [p[f"midlayer.self_attn.{name}_proj.bias"] for name in "qkv" if c.qkv_bias]
        layer = LayerWeights(
            torch.cat((q, k, v)), out,
            torch.cat((p["midlayer.mlp.gate_proj.weight"], p["midlayer.mlp.up_proj.weight"])),
            p["midlayer.mlp.down_proj.weight"], p["midlayer.input_layernorm.weight"], p["midlayer.hidden_norm.weight"],
            p["midlayer.post_attention_layernorm.weight"], c.heads, c.kv_heads, c.head_dim, c.eps, c.norm_before_residual,
            torch.cat(biases) if biases else None, p.get("midlayer.self_attn.o_proj.bias"),
            p["norm.weight"] if c.norm_output else None,
        )  # fmt: skip
        final = None if c.norm_output else p["norm.weight"]
        return HeadWeights(layer, p["fc.weight"], p["lm_head.weight"], final, feature_norms)


@dataclass
class Eagle3Sequence:
    """Committed rows of one sequence. Buffers grow by doubling."""

    keys: Tensor  # [G, capacity, D]
    values: Tensor  # [G, capacity, D]
    states: Tensor  # [capacity, H] the state of every row that feeds on
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


class Eagle3Drafter(TreeDrafter):
    """EAGLE-3 head ready to draft for one target; see `drafters.base.Drafter` for the methods' contract."""

    kind = "eagle3"
    features = "drafter_state"

    def __init__(
        self, head: Eagle3Head, target_ids_V: Tensor, embedding: Tensor, digest: str, source: str, dtype: torch.dtype
    ):
        """`embedding` [target vocabulary, H] is the head's own or the target's; `target_ids_V` maps draft to target ids.

        Matrices are kept in `dtype`; rows are computed in float32 on a CPU, in `dtype` elsewhere.
        """
        device, embedding = embedding.device, embedding.detach()
        if device.type == "cpu" and embedding.dtype not in (torch.float32, torch.bfloat16):
            embedding = embedding.float()  # what the kernels read
        self.config, self.fingerprint, self.source = head.config, digest, source
        self.width, self.aux_layers, self.notes = head.config.hidden_size, head.config.aux_layers, head.config.notes
        self._dtype = torch.float32 if device.type == "cpu" else dtype
        weights = head.weights().stored(dtype, self._dtype, device)
        layer = weights.layer
        matrices = (layer.qkv, layer.out, layer.gate_up, layer.down, weights.fc_HF, weights.lm_head_VH)
        self._kernels = dispatch.ENABLED and dispatch.supports_draft(
            matrices, layer.head_dim, layer.input_norm, embedding
        )
        if not self._kernels and dtype != self._dtype:
            weights = weights.stored(self._dtype, self._dtype, device)
        self._device, self._rows = device, RowWeights(weights.layer, weights.fc_HF, weights.feature_norms, embedding)
        self._tree = TreeWeights(weights.layer, weights.final_norm_H, weights.lm_head_VH, embedding,
                                 np.ascontiguousarray(target_ids_V.cpu().numpy(), np.int64))  # fmt: skip
        self._rope = self._tables(self.config.max_positions)
        if self._kernels:
            self._compile()

    def _compile(self) -> None:
        """Draft once, so that no decoding step waits for kernels to be compiled or loaded."""
        sequence = self.start()
        self.extend(sequence, [0], torch.zeros(1, self._rows.fc_HF.shape[1]))
        self.expand(sequence, 0, PoolConfig(depth=2, beam=1, width=1))

    def check(self, target: Any) -> None:
        """Raise UserError if the head was made for another hidden size or vocabulary than the target's."""
        check_fit(self.config, target, self.source)

    def start(self) -> Eagle3Sequence:
        """An empty sequence."""
        c, place = self.config, torch.zeros(0, dtype=self._dtype, device=self._device)
        keys, values = (place.new_zeros(c.kv_heads, _ROOM, c.head_dim) for _ in range(2))
        return Eagle3Sequence(keys, values, place.new_zeros(_ROOM, c.hidden_size))

    @torch.inference_mode()
    def extend(self, sequence: Eagle3Sequence, tokens_m: Tensor | Sequence[int], features_mF: Tensor) -> None:
        """Append m rows; row j pairs the features at position j with the token at position j + 1."""
        tokens = tokens_m.tolist() if isinstance(tokens_m, Tensor) else list(tokens_m)
        if len(tokens) != features_mF.shape[0]:
            raise ValueError(f"{len(tokens)} tokens but {features_mF.shape[0]} feature rows")
        if features_mF.shape[1] != self._rows.fc_HF.shape[1]:
            raise ValueError(f"features are {features_mF.shape[1]} wide, the head takes {self._rows.fc_HF.shape[1]}")
        sequence.reserve(sequence.length + len(tokens))
        for begin in range(0, len(tokens), dispatch.MAX_ROWS):
            part, past = tokens[begin : begin + dispatch.MAX_ROWS], sequence.length
            dispatch.draft_rows(
                self._rows, part, features_mF[begin : begin + dispatch.MAX_ROWS], self._rotation(past, past + len(part)),
                sequence.keys, sequence.values, sequence.states, past, supported=self._kernels,
            )  # fmt: skip
            sequence.tokens.extend(part)

    def pool(
        self, sequence: Eagle3Sequence, root: int, config: PoolConfig, temperatures: tuple[float, ...],
        sampler: Sampler | None,
    ) -> Pool:  # fmt: skip
        """The pool of row `root`."""
        states, past = sequence.states, root + 1
        tree: Tree = dispatch.draft_tree(
            self._tree, states[root - 1] if root else torch.zeros_like(states[0]), states[root],
            self._rotation(past, root + config.depth), sequence.keys[:, :past], sequence.values[:, :past],
            Shape(config.depth, config.beam, config.width, config.min_reach), temperatures,
            shared_noise(sampler, root, config.depth, self._tree.target_ids, self._device), supported=self._kernels,
        )  # fmt: skip
        return Pool(root_token=sequence.tokens[root], temperatures=temperatures, **tree._asdict())

    def _rotation(self, begin: int, end: int) -> Rope:
        """Rotation of positions begin..end-1; the tables double when a sequence outgrows them."""
        if end > self._rope[0].shape[0]:
            self._rope = self._tables(max(end, 2 * self._rope[0].shape[0]))
        return self._rope[0][begin:end], self._rope[1][begin:end]

    def _tables(self, positions: int) -> Rope:
        cos, sin = rope_tables(self.config, positions)
        return cos.to(self._device, self._dtype), sin.to(self._device, self._dtype)


def load_eagle3(folder: Path, source: str, target: Any, dtype: str = "auto") -> Eagle3Drafter:
    """Load a head in either published layout for a target. Raises UserError naming the file, tensor or key at fault.

    `dtype` is how matrices are kept: auto as saved. Rows are computed in float32 on a CPU, whatever `dtype`.
    """
    tensors = read_tensors(folder)
    config = read_head_config(folder, target, tensors)
    check_fit(config, target, source)
    check_tokenizer(folder, target, source)
    target_ids = checked_map(config, tensors, source)
    head = Eagle3Head(config)
    fill(head, {name: value for name, value in tensors.items() if name not in ("d2t", "t2d")}, source)
    kept = DTYPES[dtype] if dtype != "auto" else tensors["fc.weight"].dtype
    assert isinstance(kept, torch.dtype)
    if kept not in (torch.float32, torch.bfloat16):
        kept = torch.float32 if target.device.type == "cpu" else torch.bfloat16
    shared = whole_weight(target.model.get_input_embeddings())
    own = head.embed_tokens.weight.to(shared.device, kept) if config.own_embedding else None
    return Eagle3Drafter(head, target_ids, shared if own is None else own, fingerprint(folder), source, kept)


def fill(head: Eagle3Head, tensors: dict[str, Tensor], source: str) -> None:
    """Copy tensors into a head; raises UserError naming the first one that is missing, unknown, misshapen or not finite."""
    expected = head.state_dict()
    missing, unknown = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    if missing:
        raise UserError(
            f"{source}: tensor {missing[0]} is missing ({len(missing)} in all); the checkpoint is not complete"
        )
    if unknown:
        raise UserError(f"{source}: tensor {unknown[0]} is not part of an EAGLE-3 head; this variant is not supported")
    for name, value in tensors.items():
        if value.shape != expected[name].shape:
            raise UserError(
                f"{source}: tensor {name} has shape {list(value.shape)}, config.json asks for {list(expected[name].shape)}"
            )
        if not value.isfinite().all():
            raise UserError(f"{source}: tensor {name} holds NaN or infinite values; copy or download it again")
    head.load_state_dict(tensors)
