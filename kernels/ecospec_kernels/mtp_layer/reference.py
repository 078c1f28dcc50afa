"""`mtp_layer`: DeepSeek-V3's multi-token-prediction layer over a few rows: latent attention, grouped experts, a shared one.

x is `project @ cat(norm(embedding), norm(h))`; then a decoder layer and a last norm. Rows are float32, matrices and cache as
stored. Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", arXiv 2412.19437, section 2.2.

Legend of shapes: n rows, H hidden, J cached rows (the new ones last), E experts, M their width, S that of the shared one, Q rank
of queries; A heads, L, N, R, V as in `latent_attention`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ecospec_kernels.checks import not_tensors, refuse
from ecospec_kernels.draft_layer.reference import linear
from ecospec_kernels.expert_mlp.reference import expert_mlp
from ecospec_kernels.group_router.reference import Rule, group_router
from ecospec_kernels.latent_attention.reference import latent_attention, latent_rows


@dataclass(frozen=True)
class MtpWeights:
    """Weights of the layer: norms and router float32, other matrices of one dtype. ValueError if shapes do not fit together."""

    embedding_norm: Tensor  # [H]
    hidden_norm: Tensor  # [H]
    input_norm: Tensor  # [H]
    post_norm: Tensor  # [H] before the experts
    output_norm: Tensor  # [H]
    q_norm: Tensor | None  # [Q]; None: queries come straight from x
    latent_norm: Tensor  # [L]
    project: Tensor  # [H, 2 * H]
    q_down: Tensor | None  # [Q, H]
    q_up: Tensor  # [A * (N + R), Q or H]
    compress: Tensor  # [L + R, H]
    up: Tensor  # [A * (N + V), L]
    out: Tensor  # [H, A * V]
    router: Tensor  # [E, H]
    router_bias: Tensor  # [E]
    gate_up: Tensor  # [E, 2 * M, H]
    down: Tensor  # [E, H, M]
    shared_gate: Tensor  # [S, H]
    shared_up: Tensor  # [S, H]
    shared_down: Tensor  # [H, S]
    heads: int
    scale: float
    interleaved: bool
    eps: float
    latent_eps: float  # of the norms of queries and latents
    rule: Rule

    def __post_init__(self) -> None:
        if (self.q_norm is None) != (self.q_down is None):
            raise ValueError("mtp_layer: q_down and q_norm are given together or not at all")
        for name, shape in _shapes(self).items():
            weight = getattr(self, name)
            if weight is not None and weight.shape != shape:
                raise ValueError(f"mtp_layer: {name} has shape {list(weight.shape)}, not {list(shape)}")


def _shapes(w: MtpWeights) -> dict[str, tuple[int, ...]]:
    """What shape each weight has beside the others."""
    hidden, latent, experts, units, shared = len(w.embedding_norm), len(w.latent_norm), len(w.router), w.down.shape[-1], len(w.shared_gate)  # fmt: skip
    values, rotated = w.out.shape[-1] // w.heads, len(w.compress) - latent
    plain, rank = len(w.q_up) // w.heads - rotated, hidden if w.q_down is None else len(w.q_down)
    norms = dict.fromkeys(("embedding_norm", "hidden_norm", "input_norm", "post_norm", "output_norm"), (hidden,))
    return {
        **norms, "q_norm": (rank,), "latent_norm": (latent,), "project": (hidden, 2 * hidden), "q_down": (rank, hidden),
        "q_up": (w.heads * (plain + rotated), rank), "compress": (latent + rotated, hidden),
        "up": (w.heads * (plain + values), latent), "out": (hidden, w.heads * values), "router": (experts, hidden),
        "router_bias": (experts,), "gate_up": (experts, 2 * units, hidden), "down": (experts, hidden, units),
        "shared_gate": (shared, hidden), "shared_up": (shared, hidden), "shared_down": (hidden, shared),
    }  # fmt: skip


def invalid(
    w: MtpWeights, embed_nH: Tensor, h_nH: Tensor, cos_nR: Tensor, sin_nR: Tensor, latent_JL: Tensor, key_JR: Tensor,
    mask_nJ: Tensor,
) -> str | None:  # fmt: skip
    """What is wrong with the arguments, which a CPU kernel knows by their addresses alone."""
    given = {"embeddings": embed_nH, "h": h_nH, "cos": cos_nR, "sin": sin_nR, "latents": latent_JL, "keys": key_JR, "mask": mask_nJ}  # fmt: skip
    problem = not_tensors(given)
    if problem is not None:
        return problem
    n, cached = (t.shape[0] if t.dim() else 0 for t in (embed_nH, latent_JL))
    if not 0 < n <= cached:
        return f"{n} rows and {cached} cached rows, which end with them: 1 or more are wanted, and at least as many"
    hidden, latent = len(w.embedding_norm), len(w.latent_norm)
    rotated, float32, stored = len(w.compress) - latent, torch.float32, w.up.dtype
    wanted = [*[((n, hidden), float32)] * 2, *[((n, rotated), float32)] * 2,
              ((cached, latent), stored), ((cached, rotated), stored), ((n, cached), torch.bool)]  # fmt: skip
    for (name, t), (shape, dtype) in zip(given.items(), wanted, strict=True):
        if t.shape != shape or t.dtype is not dtype or t.device != w.up.device:
            return f"{name}: {list(t.shape)} {t.dtype} on {t.device}, not {list(shape)} {dtype} on {w.up.device}"
    return None


def mtp_layer(
    w: MtpWeights, embed_nH: Tensor, h_nH: Tensor, cos_nR: Tensor, sin_nR: Tensor, latent_JL: Tensor, key_JR: Tensor,
    mask_nJ: Tensor,
) -> Tensor:  # fmt: skip
    """Next states `[n, H]`; writes the rows' own latents and keys into the last n cached rows. `mask_nJ` bool: may look.

    ValueError for what `invalid` names.
    """
    refuse("mtp_layer", invalid(w, embed_nH, h_nH, cos_nR, sin_nR, latent_JL, key_JR, mask_nJ))
    n = len(embed_nH)

    def norm(x: Tensor, weight: Tensor, eps: float = w.eps) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    state = linear(torch.cat((norm(embed_nH, w.embedding_norm), norm(h_nH, w.hidden_norm)), dim=-1), w.project)
    x = norm(state, w.input_norm)
    queries = x if w.q_down is None or w.q_norm is None else norm(linear(x, w.q_down), w.q_norm, w.latent_eps)
    q = linear(queries, w.q_up).view(n, w.heads, -1)
    latent, key = latent_rows(q, linear(x, w.compress), w.latent_norm, w.latent_eps, cos_nR, sin_nR, w.interleaved)
    latent_JL[-n:], key_JR[-n:] = latent, key
    attended = latent_attention(q, latent_JL.float(), key_JR.float(), w.up, mask_nJ, w.scale)
    state = state + linear(attended.flatten(1), w.out)
    x = norm(state, w.post_norm)
    weights, index = group_router(linear(x, w.router), w.router_bias, w.rule)
    shared = linear(F.silu(linear(x, w.shared_gate)) * linear(x, w.shared_up), w.shared_down)
    state = state + expert_mlp(x, index, weights, w.gate_up, w.down) + shared
    return norm(state, w.output_norm)
