"""Pool in, candidates out: acceptance, reach and predicted experts of every node, as policies want them."""

from __future__ import annotations

import copy

import numpy as np

from ecospec_runtime.acceptance import KINDS, AcceptanceKind, AcceptanceModel, acceptance
from ecospec_runtime.device_profile import Network
from ecospec_runtime.errors import UserError
from ecospec_runtime.pool import Candidates, Pool, path_products
from ecospec_runtime.predictor import Embed, Prediction, Predictor, predicted_masks


def network_for(kind: AcceptanceKind, needs_routing: bool) -> Network:
    """How much of the predictor a policy's candidates take."""
    return "whole" if needs_routing else "acceptance" if kind == "head" else "none"


class Scorer:
    """Applies one kind of acceptance model and, where asked, the routing predictor. Bad predictions never raise."""

    def __init__(self, predictor: Predictor | None, kind: AcceptanceKind, layers: int, experts: int):
        """`layers` and `experts` are the target's; UserError if the predictor was made for other sizes."""
        if kind not in KINDS:
            raise UserError(f"acceptance={kind}: unknown kind; choose one of {', '.join(KINDS)}")
        if predictor is None and kind != "raw":
            raise UserError(f"acceptance={kind} needs a predictor; give one, or use acceptance=raw")
        if predictor is not None and (predictor.shapes.layers, predictor.shapes.experts) != (layers, experts):
            made = f"{predictor.shapes.layers} MoE layers of {predictor.shapes.experts} experts"
            raise UserError(f"the predictor was made for {made}; the target has {layers} of {experts}: fit one for it")
        self.predictor, self.kind, self.layers, self.experts = predictor, kind, layers, experts
        self.model: AcceptanceModel | None = predictor.acceptance if predictor else None

    def at(self, sampling: float) -> Scorer:
        """The scorer of text of a sampling temperature."""
        found = copy.copy(self)
        found.model = self.model and self.model.at(sampling)
        return found

    @property
    def temperatures(self) -> tuple[float, ...]:
        """Drafter temperatures that pools must carry normalizers for."""
        return (self.model.temperature,) if self.kind == "temperature" and self.model else ()

    def score(self, pool: Pool, embed: Embed, needs_routing: bool) -> Candidates:
        """Candidates of a pool. `embed` maps tokens `[N]` to the target's embeddings `[N, H]` (float32).

        Without `needs_routing` the masks stay empty.
        """
        if needs_routing and self.predictor is None:
            raise UserError("this policy needs predicted experts; give a bundle or predictor, or choose `confidence`")
        prediction: Prediction | None = None
        if self.predictor is not None and network_for(self.kind, needs_routing) != "none":
            prediction = self.predictor.predict(pool, embed, needs_routing)
        return self.judge(pool, prediction, needs_routing)

    def judge(self, pool: Pool, prediction: Prediction | None, needs_routing: bool) -> Candidates:
        """Candidates of a pool from what the network says of it; see `score`."""
        logits = prediction.acceptance_logits[1:] if prediction else None
        accepted = acceptance(pool, self.kind, self.model, logits)
        masks = [0]
        if needs_routing and self.predictor and prediction and prediction.routing_logits is not None:
            with np.errstate(over="ignore", invalid="ignore"):
                masks = predicted_masks(prediction.routing_logits, self.predictor.shapes.top_k)
        return Candidates(
            pool=pool, acceptance=accepted, reach=path_products(accepted, pool.parents), masks=masks[1:],
            root_mask=masks[0], layers=self.layers, experts=self.experts,
        )  # fmt: skip
