"""`predict_pool`: the trained predictor on a candidate tree: routing logits of root and nodes, and acceptance logits.

Row 0 is the root, the nodes follow. A row reads its token's embedding, that of its parent's token (zeros for the root), the
state that proposed it, and four scalars: log p, rank, depth and the entropy there. Embeddings and states are rounded to
float16, which is what the network was fitted on; each is normalised by its mean and variance, the scalars are divided by
SCALAR_UNIT. Then a two-layer trunk with a linear path around it and a linear routing head, to whose logits `shrinkage` times
the mean of the first two rows' is added where that is finite; and a small head for acceptance.

Numpy in and out: it runs on the host, between two passes. Legend of shapes: N rows, n = N - 1 nodes, s states, H target width, d width
of a state, L MoE layers, E experts, O = L * E.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ecospec_kernels.checks import refuse
from ecospec_kernels.predict_pool.inputs import SCALAR_UNIT, SCALARS, Floats, Tree, scalars_of

HALF_MAX = float(torch.finfo(torch.float16).max)
EPSILON = 1e-5  # of the normalisation
OUT_OF_RANGE = "predict_pool: a node names a parent or a state that is not there"
# Matrices [outputs, inputs] and biases of the layers that `Weights` holds, under the names of `predictor.safetensors`.
LAYERS = (
    "inputs", "middle", "routing",
    *(f"acceptance.{name}" for name in ("token", "state", "hidden", "linear", "correction")),
)  # fmt: skip


class Weights:
    """The fitted network, fp32: a matrix and a bias for each of LAYERS."""

    def __init__(self, tensors: dict[str, Tensor]):
        """From a state dict; KeyError if a layer is missing, ValueError if the layers' shapes do not fit together."""
        self.matrices, self.biases = (
            [tensors[f"{layer}.{part}"].detach().float().contiguous() for layer in LAYERS]
            for part in ("weight", "bias")
        )
        refuse("predict_pool", _misfit(self.matrices, self.biases))
        self.places = np.array([t.data_ptr() for t in (*self.matrices, *self.biases)], np.int64)
        trunk, mixed, inner = (len(self.biases[i]) for i in (0, 3, 5))
        self.widths = trunk, mixed, inner
        # Whether the CPU kernel takes it: only the last two layers have fewer than 8 inputs or outputs.
        self.fits = all(m.is_cpu and min(m.shape) >= 8 for m in self.matrices[:6])


def _misfit(matrices: list[Tensor], biases: list[Tensor]) -> str | None:
    """Which layer does not follow from the sizes of the others, if any."""
    for name, matrix, bias in zip(LAYERS, matrices, biases, strict=True):
        if matrix.dim() != 2 or bias.shape != matrix.shape[:1]:
            return f"{name} has a matrix {list(matrix.shape)} and a bias {list(bias.shape)}"
    width, mixed, inner, hidden, state = *(len(biases[i]) for i in (0, 3, 5)), *(matrices[i].shape[1] for i in (3, 4))
    wanted = ((width, 2 * hidden + state + SCALARS), (width, width), (len(biases[2]), width),
              (mixed, hidden), (mixed, state), (inner, mixed + SCALARS), (1, SCALARS), (1, inner))  # fmt: skip
    for name, matrix, shape in zip(LAYERS, matrices, wanted, strict=True):
        if matrix.shape != shape:
            return f"{name} has shape {list(matrix.shape)}, not {list(shape)}"
    return None


def invalid(w: Weights, embedding_NH: Floats, tree: Tree) -> str | None:
    """What array has not the shape that the weights and the others ask for, if any: a kernel knows them by addresses alone."""
    if embedding_NH.ndim != 2 or tree.states.ndim != 2 or not len(embedding_NH) or not len(tree.states):
        return f"embeddings {list(embedding_NH.shape)} and states {list(tree.states.shape)}: rows of both are wanted"
    hidden, state = (w.matrices[i].shape[1] for i in (3, 4))
    if (embedding_NH.shape[1], tree.states.shape[1]) != (hidden, state):
        found = f"{embedding_NH.shape[1]} and states of {tree.states.shape[1]} numbers"
        return f"embeddings of {found}; the network reads {hidden} and {state}"
    shape = (len(embedding_NH) - 1,)
    for name in ("parents", "state_rows", "log_probs", "ranks", "depths"):
        if getattr(tree, name).shape != shape:
            return f"{name} has shape {list(getattr(tree, name).shape)}, not {list(shape)}"
    return None if tree.entropies.ndim == 1 else f"entropies have shape {list(tree.entropies.shape)}"


def recorded(values: Tensor) -> Tensor:
    """Values as traces hold them, rounded to float16: float32."""
    return values.float().clamp(-HALF_MAX, HALF_MAX).half().float()


@torch.no_grad()
def predict_pool(
    w: Weights, embedding_NH: Floats, tree: Tree, shrinkage: float, routing: bool = True
) -> tuple[Floats, Floats]:  # fmt: skip
    """-> routing logits `[N, O]` (`[N, 0]` if not `routing`: they are most of the work) and acceptance logits `[N]`, fp32.

    ValueError for what `invalid` names, IndexError for a parent or state row out of range.
    """
    refuse("predict_pool", invalid(w, embedding_NH, tree))
    nodes, known = (
        len(tree.parents),
        min(len(tree.entropies), len(tree.states) if len(tree.states) > 1 else sys.maxsize),
    )
    if not (
        ((tree.parents >= -1) & (tree.parents < nodes)).all()
        and ((tree.state_rows >= 0) & (tree.state_rows < known)).all()
    ):
        raise IndexError(OUT_OF_RANGE)

    def layer(number: int, x: Tensor) -> Tensor:
        return F.linear(x, w.matrices[number], w.biases[number])

    embedding, states = (recorded(torch.from_numpy(x)) for x in (embedding_NH, tree.states))
    parent = torch.cat([torch.zeros_like(embedding[:1]), embedding[torch.from_numpy(tree.parents) + 1]])
    rows = torch.from_numpy(np.concatenate(([0], tree.state_rows)))
    state = states[rows if len(states) > 1 else torch.zeros_like(rows)]
    embedding, parent, state = (F.layer_norm(x, x.shape[-1:], eps=EPSILON) for x in (embedding, parent, state))
    scalars = torch.from_numpy(scalars_of(tree)) / SCALAR_UNIT
    experts = embedding[:, :0]
    if routing:
        x = layer(0, torch.cat([embedding, parent, state, scalars], -1))
        experts = layer(2, x + F.silu(layer(1, F.silu(x))))
        if shrinkage > 0 and (mean := experts[:2].mean(0)).isfinite().all():
            experts = experts + shrinkage * mean
    mixed = F.silu(layer(3, embedding) + layer(4, state))
    hidden = F.silu(layer(5, torch.cat([mixed, scalars], -1)))
    return experts.numpy(), (layer(6, scalars) + layer(7, hidden)).squeeze(-1).numpy()


def top_experts(routing_NLE: Floats, top_k: int) -> NDArray[np.uint8]:
    """The `top_k` likeliest experts of every row and layer as one set of bits per row, `[N, ceil(L * E / 8)]`.

    Bit layer * experts + expert, low bits first; of equal logits the lower expert. A row and layer with a logit that is not
    finite is unknown: it gets the experts row * top_k ... row * top_k + top_k - 1, wrapping around, so that an unknown node
    costs what a node without shared experts costs.
    """
    rows, _, experts = routing_NLE.shape
    distance = (np.arange(experts) - np.arange(rows)[:, None] * top_k) % experts
    known = np.isfinite(routing_NLE).all(-1, keepdims=True)
    chosen = np.argsort(np.where(known, -routing_NLE, distance[:, None]), axis=-1, kind="stable")[..., :top_k]
    bits = np.zeros(routing_NLE.shape, np.uint8)
    np.put_along_axis(bits, chosen, 1, axis=-1)
    return np.packbits(bits.reshape(rows, -1), axis=1, bitorder="little")
