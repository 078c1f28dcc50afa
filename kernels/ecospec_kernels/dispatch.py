"""Chooses the implementation of each op.

One rule: tensors on a CUDA or ROCm device, of a shape that the op's Triton kernel takes: that kernel (`fused`). On a CPU,
with numba installed, for the dtypes and shapes that a kernel takes: that kernel (`cpu`). Everything else: `reference`.
`ECOSPEC_KERNELS` in the environment (read at import) names the only kernels that may run: `reference` (none), `cpu`, or
`fused`, which under Triton's interpreter (`TRITON_INTERPRET=1`) takes CPU tensors too. `CALLS` counts what ran, by
(op, implementation); the first call of each is logged.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections import Counter
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ecospec_kernels.expert_mlp.reference import GROUP, Mxfp4
from ecospec_kernels.lanes import LANES

OVERRIDE = os.environ.get("ECOSPEC_KERNELS", "")
if OVERRIDE not in ("", "reference", "cpu", "fused"):
    raise ValueError(f"ECOSPEC_KERNELS={OVERRIDE} in the environment: unset it or set reference, cpu or fused")
ENABLED = OVERRIDE in ("", "cpu") and importlib.util.find_spec("numba") is not None  # the CPU kernels
_LOGGER = logging.getLogger(__name__)
CALLS: Counter[tuple[str, str]] = Counter()
MAX_ROWS = 64  # a drafted pool and its root; larger passes are bound by arithmetic


@cache
def native_bf16() -> bool:
    """Whether this processor multiplies bf16 in hardware; torch's bf16 products are an emulation elsewhere."""
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, bool)() for name in checks)


@cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


@cache
def interprets() -> bool:
    """Whether Triton kernels run on CPU tensors here: asked for, and interpreted."""
    return OVERRIDE == "fused" and has_triton() and bool(import_module("triton").knobs.runtime.interpret)


def runs_triton(t: Tensor) -> bool:
    """Whether Triton kernels may run on the device of `t`."""
    return OVERRIDE in ("", "fused") and has_triton() if t.is_cuda else t.is_cpu and interprets()


@cache
def _module(op: str, implementation: str) -> ModuleType:
    return import_module(f"ecospec_kernels.{op}.{implementation}")


def compiles_first() -> bool:
    """Whether the kernels have still to be compiled, which takes up to a minute once."""
    return ENABLED and bool(import_module("ecospec_kernels.blocks").is_cold())


@cache
def _log(op: str, implementation: str) -> None:
    _LOGGER.info("%s runs its implementation `%s`", op, implementation)


def _count(op: str, implementation: str) -> None:
    CALLS[op, implementation] += 1
    _log(op, implementation)


def _fused(op: str, *arguments: Any) -> bool:
    """Whether the Triton kernel of `op` takes these arguments, by its own `unsupported`; the first lies on the device."""
    return (
        isinstance(arguments[0], Tensor)
        and runs_triton(arguments[0])
        and not torch.is_grad_enabled()
        and _module(op, "fused").unsupported(*arguments) is None
    )


def _choose(op: str, cpu: bool, fused: bool = False) -> ModuleType:
    """The module that runs `op`, given which kernels take the call; counts it."""
    implementation = "fused" if fused else "cpu" if cpu else "reference"
    _count(op, implementation)
    return _module(op, implementation)


def _plain(t: Tensor) -> bool:
    """On the CPU and bf16 or fp32."""
    return t.is_cpu and (t.dtype is torch.bfloat16 or t.dtype is torch.float32)


def _rows(n: int, weight: Tensor) -> bool:
    """Whether a kernel is the better choice for n rows."""
    return 0 < n <= MAX_ROWS or (n > 0 and weight.dtype is torch.bfloat16 and not native_bf16())


def _columns(k: int, dtype: torch.dtype) -> bool:
    """Whether k columns are whole 32-bit words and at least one vector long."""
    return k >= 16 and k % 2 == 0 if dtype is torch.bfloat16 else k >= 8


def supports_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the CPU kernel takes this call: x [..., K], weight [O >= 8, K] contiguous, no gradient."""
    outputs, columns = weight.shape
    return (
        ENABLED and _plain(x) and _plain(weight) and weight.is_contiguous() and _columns(columns, weight.dtype)
        and outputs >= 8 and _rows(x.numel() // columns, weight) and not torch.is_grad_enabled()
        and (bias is None or (bias.dtype is weight.dtype and bias.is_contiguous()))
    )  # fmt: skip


def few_row_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., K] @ weight [O, K].T (+ bias [O]) -> [..., O] in x's dtype, accumulated in fp32."""
    return _choose("few_row_linear", supports_linear(x, weight, bias)).few_row_linear(x, weight, bias)  # type: ignore[no-any-return]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A drop-in `F.linear`: the CPU kernel where it is taken, else torch's own product in the inputs' dtype."""
    if supports_linear(x, weight, bias):
        _count("few_row_linear", "cpu")
        return _module("few_row_linear", "cpu").few_row_linear(x, weight, bias)  # type: ignore[no-any-return]
    return F.linear(x, weight, bias)


def supports_experts(
    hidden_ND: Tensor, index_NK: Tensor, weight_NK: Tensor, gate_up: Any, down: Any, *biases: Tensor | None
) -> bool:
    """Whether the CPU kernel takes this call: contiguous gate_up [E, 2M, D], down [E, D, M] and biases.

    Plain ones are of one dtype; beside MXFP4 matrices biases of one dtype.
    """
    given = hidden_ND, index_NK, weight_NK, *(bias for bias in biases if bias is not None)
    if not all(isinstance(t, Tensor) for t in given):
        return False
    if isinstance(gate_up, Mxfp4) and isinstance(down, Mxfp4):
        parts = *gate_up, *down
        kinds = {bias.dtype for bias in biases if bias is not None}
        fits = hidden_ND.size(0) > 0 and len(kinds) < 2 and all(t.is_cpu and t.is_contiguous() for t in parts)
        fits = fits and gate_up.invalid() is None and down.invalid() is None
        fits = fits and gate_up.shape[1] % GROUP == 0 and down.shape[1] % GROUP == 0
    elif isinstance(gate_up, Tensor) and isinstance(down, Tensor):
        kinds = {gate_up.dtype}
        fits = (
            gate_up.dim() == down.dim() == 3 and _rows(hidden_ND.size(0), gate_up) and gate_up.dtype is down.dtype and _plain(gate_up)
            and _columns(gate_up.size(2), gate_up.dtype) and _columns(down.size(2), down.dtype)
            and down.size(1) >= 8 and gate_up.is_contiguous() and down.is_contiguous()
        )  # fmt: skip
    else:
        return False
    return (
        ENABLED and fits and index_NK.dtype is torch.int64 and _plain(hidden_ND) and hidden_ND.dim() == 2 and hidden_ND.stride(1) == 1
        and _plain(weight_NK) and not torch.is_grad_enabled() and index_NK.is_contiguous() and weight_NK.is_contiguous()
        and gate_up.shape[1] == 2 * down.shape[2] and down.shape[1] == gate_up.shape[2] == hidden_ND.size(1)
        and all(bias is None or (_plain(bias) and bias.dtype in kinds and bias.is_contiguous()) for bias in biases)
    )  # fmt: skip


def expert_mlp(hidden_ND: Tensor, index_NK: Tensor, weight_NK: Tensor, gate_up: Any, down: Any, *rest: Any) -> Tensor:
    """Experts of one MoE layer -> [n, D] in hidden's dtype; `rest`: gate and biases, see `expert_mlp/reference.py`.

    gate_up and down: tensors, or its `Fp8`, which the CPU kernel does not take, or `Mxfp4`.
    """
    arguments = hidden_ND, index_NK, weight_NK, gate_up, down, *rest
    fused = _fused("expert_mlp", *arguments)
    module = _choose("expert_mlp", not fused and supports_experts(*arguments[:5], *rest[1:]), fused)
    return module.expert_mlp(*arguments)  # type: ignore[no-any-return]


def fast_experts(*arguments: Any) -> Tensor | None:
    """`expert_mlp` by a kernel, or None where only the reference takes the call: for a caller with its own fallback."""
    fused = _fused("expert_mlp", *arguments)
    if not fused and not supports_experts(*arguments[:5], *arguments[6:]):
        return None
    return _choose("expert_mlp", True, fused).expert_mlp(*arguments)  # type: ignore[no-any-return]


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMS normalisation of the last dimension, in x's dtype; the kernel takes contiguous bf16."""
    supported = (
        ENABLED and x.dtype is weight.dtype is torch.bfloat16 and x.is_cpu and x.is_contiguous() and x.numel() > 0
        and not torch.is_grad_enabled()
    )  # fmt: skip
    return _choose("rms_norm", supported).rms_norm(x, weight, epsilon)  # type: ignore[no-any-return]


def supports_attention(q_HnD: Tensor, k_GJD: Tensor, v_GJD: Tensor, mask_nJ: Tensor | None) -> bool:
    """Whether the CPU kernel takes this call: bf16, up to MAX_ROWS rows, a mask with dense rows."""
    return (
        ENABLED and q_HnD.dim() == k_GJD.dim() == v_GJD.dim() == 3 and 0 < q_HnD.size(1) <= MAX_ROWS
        and q_HnD.dtype is k_GJD.dtype is v_GJD.dtype is torch.bfloat16 and q_HnD.is_cpu and q_HnD.stride(2) == 1
        and k_GJD.stride(2) == 1 and v_GJD.stride(2) == 1 and _columns(q_HnD.size(2), q_HnD.dtype)
        and (mask_nJ is None or (mask_nJ.shape == (q_HnD.size(1), k_GJD.size(1)) and mask_nJ.stride(1) == 1
                                 and (mask_nJ.dtype is torch.bool or _plain(mask_nJ))))
        and not torch.is_grad_enabled()
    )  # fmt: skip


def tree_attention(
    q_HnD: Tensor, k_GJD: Tensor, v_GJD: Tensor, mask_nJ: Tensor | None, scale: float, sinks_H: Tensor | None = None,
    start: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention of n rows under any mask -> [n, H, D]; see `tree_attention/reference.py`."""
    arguments = q_HnD, k_GJD, v_GJD, mask_nJ, scale, sinks_H, start
    fused = _fused("tree_attention", *arguments)
    module = _choose("tree_attention", not fused and supports_attention(*arguments[:4]), fused)
    return module.tree_attention(*arguments)  # type: ignore[no-any-return]


def fast_attention(*arguments: Any) -> Tensor | None:
    """`tree_attention` by a kernel, or None where only the reference takes the call: for a caller with its own fallback."""
    fused = _fused("tree_attention", *arguments)
    if not fused and not supports_attention(*arguments[:4]):
        return None
    return _choose("tree_attention", True, fused).tree_attention(*arguments)  # type: ignore[no-any-return]


def supports_latent(
    q_nHD: Tensor, compressed_nC: Tensor, cos_nR: Tensor, up_OL: Tensor, mask_nJ: Tensor | None
) -> bool:
    """Whether the CPU kernels of `latent_attention` take this call: all of one dtype, up to MAX_ROWS rows, dense but for masks."""
    dtype, dim, latent = q_nHD.dtype, cos_nR.size(1), up_OL.size(1)
    return (
        ENABLED and _plain(q_nHD) and 0 < q_nHD.size(0) <= MAX_ROWS and not torch.is_grad_enabled()
        and dtype is compressed_nC.dtype is cos_nR.dtype is up_OL.dtype and compressed_nC.size(1) == latent + dim
        and q_nHD.is_contiguous() and compressed_nC.is_contiguous() and up_OL.is_contiguous() and cos_nR.stride(1) == 1
        and dim % 2 == 0 and _columns(dim, dtype) and _columns(latent, dtype) and q_nHD.size(2) > dim
        and up_OL.size(0) // q_nHD.size(1) >= q_nHD.size(2) - dim + 8
        and (mask_nJ is None or (mask_nJ.stride(1) == 1 and (mask_nJ.dtype is torch.bool or _plain(mask_nJ))))
    )  # fmt: skip


def latent_rows(q_nHD: Tensor, *rest: Any, supported: bool) -> tuple[Tensor, Tensor]:
    """What a pass adds to a cache of latents; see `latent_attention/reference.py`. `supported`: what `supports_latent` said."""
    return _module("latent_attention", "cpu" if supported else "reference").latent_rows(q_nHD, *rest)  # type: ignore[no-any-return]


def latent_attention(q_nHD: Tensor, *rest: Any, supported: bool) -> Tensor:
    """Attention of n rows over latents -> [n, H, V]; see `latent_attention/reference.py`."""
    return _choose("latent_attention", supported).latent_attention(q_nHD, *rest)  # type: ignore[no-any-return]


def supports_mtp(w: Any) -> bool:
    """Whether the CPU kernel of `mtp_layer` takes these weights (see its `MtpWeights`); some rows must be cached."""
    norms = (w.embedding_norm, w.hidden_norm, w.input_norm, w.post_norm, w.output_norm, w.latent_norm, w.router,
             w.router_bias)  # fmt: skip
    matrices = [
        w.project,
        w.q_up,
        w.compress,
        w.up,
        w.out,
        w.gate_up,
        w.down,
        w.shared_gate,
        w.shared_up,
        w.shared_down,
    ]
    matrices += [] if w.q_down is None else [w.q_down]
    dim = w.compress.size(0) - w.up.size(1)
    return (
        ENABLED and all(t.is_cpu and t.dtype is torch.float32 and t.is_contiguous() for t in norms) and w.router.size(0) >= 8
        and all(_plain(m) and m.is_contiguous() and m.dtype is w.up.dtype for m in matrices)
        and all(_columns(m.size(-1), m.dtype) and m.size(-2) >= 8 for m in matrices) and dim % 2 == 0
        and _columns(dim, w.up.dtype) and w.up.size(0) // w.heads >= w.q_up.size(0) // w.heads - dim + 8
    )  # fmt: skip


def mtp_layer(w: Any, embed_nH: Tensor, *rest: Tensor, supported: bool) -> Tensor:
    """Next states of an MTP layer -> [n, H]; see `mtp_layer/reference.py`. `supported`: what `supports_mtp` said."""
    fits = supported and len(embed_nH) <= MAX_ROWS and len(rest[3]) >= 8 and not torch.is_grad_enabled()
    return _choose("mtp_layer", fits).mtp_layer(w, embed_nH, *rest)  # type: ignore[no-any-return]


def group_router(logits_nE: Tensor, bias_E: Tensor, rule: Any) -> tuple[Tensor, Tensor]:
    """Weights and expert ids of n rows -> [n, K] twice; see `group_router/reference.py`."""
    both = logits_nE, bias_E
    dense = all(t.is_cpu and t.dtype is torch.float32 and t.is_contiguous() for t in both)
    return _choose("group_router", ENABLED and dense and not torch.is_grad_enabled()).group_router(*both, rule)  # type: ignore[no-any-return]


def best_tokens(logits_nV: Tensor, width: int, temperatures: tuple[float, ...], noise: Tensor | None = None) -> Any:
    """The best tokens of n states -> `Proposals`; see `draft_propose/reference.py`."""
    cpu = ENABLED and _plain(logits_nV) and logits_nV.numel() > 0 and not torch.is_grad_enabled()
    return _choose("draft_propose", cpu).best_tokens(logits_nV, width, temperatures, noise)


def supports_draft(matrices: tuple[Tensor, ...], head_dim: int, rows: Tensor, embedding: Tensor) -> bool:
    """Whether the CPU kernels of `draft_rows` and `draft_tree` take these matrices (one dtype), rows and embedding."""
    fits = rows.is_cpu and rows.dtype is torch.float32 and _plain(embedding) and embedding.is_contiguous()
    return fits and head_dim % (LANES if head_dim > LANES else 8) == 0 and all(
        _plain(m) and m.is_contiguous() and m.dtype is matrices[0].dtype and m.size(0) >= 8 and _columns(m.size(1), m.dtype)
        for m in matrices
    )  # fmt: skip


def draft_rows(w: Any, tokens: list[int], *arguments: Any, supported: bool) -> None:
    """Commit rows of an EAGLE-3 head; see `draft_rows/reference.py`. `supported`: what `supports_draft` said."""
    fits = supported and 0 < len(tokens) <= MAX_ROWS and not torch.is_grad_enabled()
    _choose("draft_rows", fits).draft_rows(w, tokens, *arguments)


def draft_tree(w: Any, before_H: Tensor, root_H: Tensor, rope: Any, keys_GPD: Tensor, values_GPD: Tensor, shape: Any,
               temperatures: tuple[float, ...], noise_dV: Tensor | None = None, *, supported: bool) -> Any:  # fmt: skip
    """The candidate tree below a root; see `draft_tree/reference.py`. `supported`: what `supports_draft` said."""
    small = min(shape.beam, shape.width) <= MAX_ROWS
    module = _choose("draft_tree", supported and small and not torch.is_grad_enabled())
    return module.draft_tree(w, before_H, root_H, rope, keys_GPD, values_GPD, shape, temperatures, noise_dV)


def select_nodes(reach_n: Tensor, parents_n: Tensor, masks_nLW: Tensor, root_LW: Tensor, rule: Any, budget: int) -> Any:
    """A verification set -> `Selection`; see `select_nodes/reference.py`."""
    arguments = reach_n, parents_n, masks_nLW, root_LW, rule, budget
    return _choose("select_nodes", False, _fused("select_nodes", *arguments)).select_nodes(*arguments)


def verify_tree(next_R: Tensor, tokens_n: Tensor, parents_n: Tensor) -> Any:
    """The path that a pass accepts -> `Accepted`; see `verify_tree/reference.py`."""
    arguments = next_R, tokens_n, parents_n
    return _choose("verify_tree", False, _fused("verify_tree", *arguments)).verify_tree(*arguments)


def argmax_rows(logits_RV: Tensor) -> Tensor:
    """Lowest id of the largest logit of each row -> [R] int64; see `argmax_rows/reference.py`."""
    return _choose("argmax_rows", False, _fused("argmax_rows", logits_RV)).argmax_rows(logits_RV)  # type: ignore[no-any-return]


def commit_path(keys_HCD: Tensor, values_HCE: Tensor, rows_m: Tensor, count: Tensor, past: Tensor) -> Tensor:
    """Keep the accepted rows of a pass, in place -> committed rows [1]; see `commit_path/reference.py`."""
    arguments = keys_HCD, values_HCE, rows_m, count, past
    return _choose("commit_path", False, _fused("commit_path", *arguments)).commit_path(*arguments)  # type: ignore[no-any-return]


def fast_commit(*arguments: Any) -> bool:
    """`commit_path` by the Triton kernel; False where it does not take the call: for a caller with its own fallback."""
    fused = _fused("commit_path", *arguments)
    if fused:
        _choose("commit_path", False, fused).commit_path(*arguments)
    return fused


def expert_predictor(hidden_NW: Tensor, head_LEW: Tensor, bias_LE: Tensor, top_k: int, *rest: Any) -> Tensor:
    """Predicted experts of every row and layer; `rest`: shrinkage and output, see `expert_predictor/reference.py`."""
    arguments = hidden_NW, head_LEW, bias_LE, top_k, *rest
    module = _choose("expert_predictor", False, _fused("expert_predictor", *arguments))
    return module.expert_predictor(*arguments)  # type: ignore[no-any-return]


def noise(seed: int, position: int, count: int, temperature: float) -> Any:
    """What the host adds to the logits of one row of `draw_rows`, float32 `[count]`; see its `reference.noise`. Not a call that is counted."""
    return _module("draw_rows", "cpu" if ENABLED else "reference").noise(seed, position, count, temperature)


def predict_pool(w: Any, embedding_NH: Any, tree: Any, shrinkage: float, routing: bool = True) -> Any:
    """What the predictor says of a candidate tree, arrays of numpy; see `predict_pool/reference.py`."""
    return _choose("predict_pool", ENABLED and w.fits).predict_pool(w, embedding_NH, tree, shrinkage, routing)


def accept_tree(tree: Any, *rest: Any) -> Any:
    """Acceptance of a candidate tree's nodes, arrays of numpy; see `accept_tree/reference.py`. Not a call that is counted."""
    return _module("accept_tree", "cpu" if ENABLED else "reference").accept_tree(tree, *rest)


def top_experts(routing_NLE: Any, top_k: int) -> Any:
    """The likeliest experts of every row and layer as bits; see `predict_pool/reference.py`. Not a call that is counted."""
    return _module("predict_pool", "cpu" if ENABLED else "reference").top_experts(routing_NLE, top_k)


def draw_rows(logits_RV: Tensor, positions_R: Tensor, seed: Tensor, temperature: Tensor) -> Tensor:
    """Keyed Gumbel draw of each row -> [R] int64; see `draw_rows/reference.py`."""
    arguments = logits_RV, positions_R, seed, temperature
    return _choose("draw_rows", False, _fused("draw_rows", *arguments)).draw_rows(*arguments)  # type: ignore[no-any-return]
