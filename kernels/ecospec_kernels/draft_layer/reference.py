"""`draft_layer`: the decoder layer of an EAGLE-3 head over a few rows.

Attention input is `cat(norm(embedding), norm(h))`; a row sees all committed rows and those recent rows that its mask
allows, its own included. Then output projection, SwiGLU MLP, two residuals, and in some heads a norm over the result.
Source: Li et al., arXiv 2503.01840.

Legend of shapes: n rows, H hidden, D head dim, A = heads * D, G key-value heads, g query heads per key-value head,
I MLP width, P committed rows, r recent rows (the n new ones last).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Rope = tuple[Tensor, Tensor]  # cosine and sign-carrying sine [n or 1, 1, D]: x * cos + roll(x, D / 2) * sin


@dataclass(frozen=True)
class LayerWeights:
    """Weights of the layer. Matrices may be stored in bf16 while rows and norms are float32."""

    qkv: Tensor  # [A + 2 * G * D, 2 * H] rows of q, k, v
    out: Tensor  # [H, A]
    gate_up: Tensor  # [2 * I, H]
    down: Tensor  # [H, I]
    input_norm: Tensor  # [H] of the embedding
    hidden_norm: Tensor  # [H] of h
    post_norm: Tensor  # [H] before the MLP
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    norm_before_residual: bool  # the residual is norm(h), not h
    qkv_bias: Tensor | None = None  # [A + 2 * G * D]
    out_bias: Tensor | None = None  # [H]
    output_norm: Tensor | None = None  # [H] over the next state; None: the next state is the plain sum

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMS norm over the last dimension."""
        return F.rms_norm(x, weight.shape, weight, self.eps)

    def project(self, embed: Tensor, h: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`[..., n, H]` twice -> residual `[..., n, H]`, rotated queries `[..., n, heads, D]` and keys, values `[..., n, G, D]`."""
        normed = self.norm(h, self.hidden_norm)
        x = torch.cat((self.norm(embed, self.input_norm), normed), dim=-1)
        qkv = linear(x, self.qkv, self.qkv_bias).unflatten(-1, (self.heads + 2 * self.kv_heads, self.head_dim))
        rotated, v = qkv.split((self.heads + self.kv_heads, self.kv_heads), dim=-2)
        rotated = rotated * rope[0] + rotated.roll(self.head_dim // 2, -1) * rope[1]
        q, k = rotated.split((self.heads, self.kv_heads), dim=-2)
        return normed if self.norm_before_residual else h, q, k, v

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Output projection of `[..., n, A]`, MLP, both residuals, output norm if any -> the next state `[..., n, H]`."""
        h = residual + linear(attended, self.out, self.out_bias)
        gate, up = linear(self.norm(h, self.post_norm), self.gate_up).chunk(2, dim=-1)
        state = h + linear(F.silu(gate) * up, self.down)
        return state if self.output_norm is None else self.norm(state, self.output_norm)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T (+ bias) in x's dtype."""
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def draft_layer(
    w: LayerWeights, embed_nH: Tensor, h_nH: Tensor, rope: Rope, keys_GPD: Tensor, values_GPD: Tensor,
    recent_keys_GrD: Tensor, recent_values_GrD: Tensor, seen_nr: Tensor,
) -> Tensor:  # fmt: skip
    """Next states `[n, H]`; writes the rows' own keys and values into the last n recent rows.

    `seen_nr` is bool: which recent rows each row may see.
    """
    n, groups = embed_nH.shape[0], w.heads // w.kv_heads
    residual, q, k, v = w.project(embed_nH, h_nH, rope)
    recent_keys_GrD[:, -n:], recent_values_GrD[:, -n:] = k.transpose(0, 1), v.transpose(0, 1)
    q = q.unflatten(1, (w.kv_heads, groups)).permute(1, 2, 0, 3).flatten(1, 2) * w.head_dim**-0.5  # [G, g * n, D]
    recent = (q @ recent_keys_GrD.transpose(1, 2)).unflatten(1, (groups, n)).masked_fill(~seen_nr, -torch.inf)
    scores = torch.cat((q @ keys_GPD.transpose(1, 2), recent.flatten(1, 2)), dim=-1).softmax(-1)
    past = keys_GPD.shape[1]
    attended = scores[..., :past] @ values_GPD + scores[..., past:] @ recent_values_GrD
    return w.finish(residual, attended.unflatten(1, (groups, n)).permute(2, 0, 1, 3).flatten(1))
