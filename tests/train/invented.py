"""A predictor for the invented target of `synthetic`, and a device to run it on; neither needs files."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from ecospec_runtime.acceptance import AcceptanceModel, LogisticWeights
from ecospec_runtime.device_profile import DeviceProfile
from ecospec_runtime.pool import Pool
from ecospec_runtime.predictor import Prediction
from tests.train.synthetic import EXPERTS, LAYERS, TOP_K, World


class NearlyRightPredictor:
    """Reads the context out of the root's state and knows the invented target's tables; errs on every fifth token."""

    def __init__(self, fingerprint: str = "t" * 64):
        self.world = World(0)
        self.shapes = SimpleNamespace(layers=LAYERS, experts=EXPERTS, top_k=TOP_K)
        target = {"fingerprint": fingerprint, "id": "invented"}
        self.manifest = SimpleNamespace(
            target=target,
            drafter={"fingerprint": "d" * 64, "kind": "eagle3", "id": "invented"},
            traces="",
            heldout_prompts=[],
            fitted_on=lambda traces: traces == self.manifest.traces,
        )
        self.acceptance = AcceptanceModel(best="head", temperature=0.7, logistic=LogisticWeights(depth=-0.1, bias=0.3))

    def predict(self, pool: Pool, embed: object, routing: bool = True) -> Prediction:
        world, tokens = self.world, np.concatenate(([pool.root_token], pool.tokens)).astype(np.int64)
        seen = pool.states[1] - world.states[pool.root_token]
        context = int(((world.contexts - seen) ** 2).sum(-1).argmin())
        routing = np.zeros((len(tokens), LAYERS, EXPERTS), np.float32)
        np.put_along_axis(routing, world.routing[context, tokens].astype(np.int64), 1.0, axis=-1)
        routing[tokens % 5 == 0] = np.sin(np.arange(LAYERS * EXPERTS)).reshape(LAYERS, EXPERTS)
        logits = world.logits[context, tokens[pool.parents + 1]]
        chances = np.exp(logits[np.arange(len(pool)), pool.tokens]) / np.exp(logits).sum(-1)
        others = 1.0 - np.bincount(pool.parents + 1, chances)[pool.parents + 1]
        return Prediction(routing, np.concatenate(([0.0], np.log(chances / others))).astype(np.float32))


def make_profile(per_expert_ms: float = 0.05, draft_level_ms: float = 0.02, **changes: float) -> DeviceProfile:
    plain = 0.2 + 0.01 + per_expert_ms * LAYERS * TOP_K
    values = {"fixed_ms": 0.2, "per_token_ms": 0.01, "per_expert_ms": per_expert_ms, "per_context_ms": 1e-4,
              "draft_level_ms": draft_level_ms, "draft_node_ms": 0.0005, "draft_fixed_ms": 0.03, "predict_ms": 0.01, "predict_node_ms": 0.0005,
              "accept_ms": 0.004, "accept_node_ms": 0.0002, "select_ms": 0.004,
              "heldout_error": 0.0, "plain_ms": plain, "expert_share": 0.5}  # fmt: skip
    return DeviceProfile(device="d", slug="d-float32-1t", dtype="float32", threads=1, versions={}, **(values | changes))
