"""The predictor network and its Lightning training: expert routing and acceptance from what the drafter knows.

Inputs are the token's embedding, its parent's, the drafter state that proposed it and four scalars. All large matrices have
one side of `width`, so cost stays low-rank for targets with many experts.

Legend: N rows (roots and nodes of many pools), H target width, d drafter width, L MoE layers, E experts, K top-k,
W trunk width, G sibling groups.
"""

from __future__ import annotations

import math
import time

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ecospec_kernels.accept_tree.reference import LOGIT_BOUND
from ecospec_kernels.predict_pool.inputs import SCALAR_UNIT, SCALARS
from ecospec_runtime.acceptance import LogisticWeights
from ecospec_runtime.device_predictor import RoutingNetwork
from ecospec_runtime.errors import UserError
from ecospec_runtime.predictor import PredictorShapes
from ecospec_train.predictor_data import Batch

ACCEPTANCE_WIDTH, ACCEPTANCE_HIDDEN = 16, 32
INPUT_DROPOUT, HIDDEN_DROPOUT = 0.4, 0.2  # without them the head learns the fit prompts by heart


class AcceptanceHead(nn.Module):
    """Acceptance logit: the logistic of the scalars, which stays as it is, corrected by what token and state say.

    Small, and apart from the routing trunk: a few thousand reached nodes are soon learned by heart. `keep` takes back
    what does not carry over to other text.
    """

    def __init__(self, shapes: PredictorShapes):
        super().__init__()
        self.linear = nn.Linear(SCALARS, 1)
        self.token = nn.Linear(shapes.hidden, ACCEPTANCE_WIDTH)
        self.state = nn.Linear(shapes.state, ACCEPTANCE_WIDTH)
        self.hidden = nn.Linear(ACCEPTANCE_WIDTH + SCALARS, ACCEPTANCE_HIDDEN)
        self.correction = nn.Linear(ACCEPTANCE_HIDDEN, 1)
        self.linear.requires_grad_(False)
        self.start(LogisticWeights())

    @torch.no_grad()
    def start(self, weights: LogisticWeights) -> None:
        """Be the logistic of these weights, uncorrected. Before anything was fitted that is the drafter's log p."""
        self.linear.weight.copy_(SCALAR_UNIT * torch.from_numpy(weights.vector()))
        self.linear.bias.fill_(weights.bias)
        self.correction.weight.zero_()
        self.correction.bias.zero_()

    @torch.no_grad()
    def keep(self, share: float) -> None:
        """Leave `share` of the correction to the logit: a geometric blend of head and logistic."""
        self.correction.weight.mul_(share)
        self.correction.bias.mul_(share)

    def forward(self, embedding_NH: Tensor, state_Nd: Tensor, scalars_N4: Tensor) -> Tensor:
        """Logits `[N]` from normalised inputs."""
        token = self.token(F.dropout(embedding_NH, INPUT_DROPOUT, self.training))
        state = self.state(F.dropout(state_Nd, INPUT_DROPOUT, self.training))
        mixed = F.dropout(F.silu(token + state), HIDDEN_DROPOUT, self.training)
        hidden = F.silu(self.hidden(torch.cat([mixed, scalars_N4], -1)))
        return (self.linear(scalars_N4) + self.correction(hidden)).squeeze(-1)


class PredictorNetwork(RoutingNetwork):
    """Routing as `RoutingNetwork` has it. Acceptance: a small head of its own."""

    def __init__(self, shapes: PredictorShapes, width: int):
        super().__init__(shapes, width)
        self.acceptance = AcceptanceHead(shapes)

    def forward(
        self, embedding_NH: Tensor, parent_NH: Tensor, state_Nd: Tensor, scalars_N4: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Routing logits `[N, L, E]` and acceptance logits `[N]`."""
        normalised = embedding, _, state, scalars = self.normalised(embedding_NH, parent_NH, state_Nd, scalars_N4)
        routing = self.routing(self.trunk(normalised)).unflatten(-1, (self.shapes.layers, self.shapes.experts))
        return routing, self.acceptance(embedding, state, scalars)


def routing_loss(logits_NLE: Tensor, routing_NLK: Tensor) -> Tensor:
    """Binary cross-entropy of every expert, summed over experts and divided by K: mean over rows and layers."""
    chosen = logits_NLE.gather(-1, routing_NLK).sum(-1)
    return (F.softplus(logits_NLE).sum(-1) - chosen).mean() / routing_NLK.size(-1)


def acceptance_loss(logits_N: Tensor, group_N: Tensor, label_N: Tensor, weight_N: Tensor, groups: int) -> Tensor:
    """Cross-entropy over each sibling group and "none of these" (logit 0): weighted mean over the groups.

    `group_N` numbers the sibling groups from 0; `label_N` is the target's probability of the node (0 or 1 at temperature
    0); `weight_N` is the weight of the node's group, the same for all siblings.
    """
    logits = logits_N.clamp(-LOGIT_BOUND, LOGIT_BOUND)
    zeros = logits.new_zeros(groups)
    denominator_G = torch.log1p(zeros.index_add(0, group_N, logits.exp()))
    weight_G = zeros.scatter(0, group_N, weight_N)
    total = (denominator_G * weight_G).sum() - (label_N * weight_N * logits).sum()
    return total / weight_G.sum().clamp(min=1e-6)


def recall(logits_NLE: Tensor, routing_NLK: Tensor) -> Tensor:
    """Share of the true experts among the K highest logits, mean over rows and layers."""
    top_k = routing_NLK.size(-1)
    threshold = logits_NLE.topk(top_k, dim=-1).values[..., -1:]
    return (logits_NLE.gather(-1, routing_NLK) >= threshold).float().mean()


class PredictorModule(L.LightningModule):
    """AdamW under a cosine schedule that follows steps or the time budget, whichever is further."""

    def __init__(self, network: PredictorNetwork, steps: int, lr: float, weight_decay: float,
                 max_seconds: float | None):  # fmt: skip
        super().__init__()
        self.network, self.steps, self.max_seconds = network, steps, max_seconds
        self.lr, self.weight_decay = lr, weight_decay
        self.started = time.monotonic()

    def on_fit_start(self) -> None:
        """Start the clock of the time budget."""
        self.started = time.monotonic()

    def progress(self) -> float:
        """Fraction of training done, in [0, 1]; rank 0 decides."""
        done = self.global_step / max(1, self.steps)
        if self.max_seconds is not None:
            elapsed = (time.monotonic() - self.started) / self.max_seconds
            done = max(done, float(self.trainer.strategy.broadcast(torch.tensor(elapsed))))
        return min(1.0, done)

    def losses(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Routing loss, acceptance loss and routing logits of a batch."""
        routing_logits, acceptance_logits = self.network(batch.embedding, batch.parent, batch.state, batch.scalars)
        routing = routing_loss(routing_logits, batch.routing)
        accepted = acceptance_loss(
            acceptance_logits + batch.offset, batch.group, batch.label, batch.weight, batch.groups
        )
        return routing, accepted, routing_logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Sum of both losses. UserError when it is not finite: the traces hold NaN or infinite values."""
        progress = self.progress()
        scale = min(1.0, (self.global_step + 1) / 20) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = self.lr * scale
        routing, accepted, _ = self.losses(batch)
        loss = routing + accepted  # no parameter is shared
        if not torch.isfinite(loss):
            raise UserError(
                f"loss is not finite at step {self.global_step}: harvest the traces again or lower lr={self.lr}"
            )
        self.log_dict({"routing_loss": routing.detach(), "acceptance_loss": accepted.detach()}, on_step=False,
                      on_epoch=True, batch_size=len(batch.label))  # fmt: skip
        if progress >= 1:
            self.trainer.should_stop = True
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Held-out losses and recall."""
        routing, accepted, logits = self.losses(batch)
        values = {"heldout_routing_loss": routing, "heldout_acceptance_loss": accepted,
                  "heldout_recall": recall(logits, batch.routing)}  # fmt: skip
        self.log_dict(values, batch_size=len(batch.label), sync_dist=True, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW; biases are not decayed."""
        trained = [p for p in self.network.parameters() if p.requires_grad]
        matrices, vectors = [p for p in trained if p.ndim >= 2], [p for p in trained if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": self.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=self.lr, betas=(0.9, 0.98), fused=True)
