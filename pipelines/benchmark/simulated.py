"""What a benchmark changes about a device and about routing to ask how policies fare elsewhere. Nothing here was measured."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ecospec_runtime.device_profile import DeviceProfile
from ecospec_runtime.errors import UserError
from ecospec_runtime.predictor import Predictor
from ecospec_train.replay import ReplayRows
from ecospec_train.traces import TraceManifest, Traces, TraceShard

# Their routers call `torch.topk`, which sorts by falling weight; traces of older releases do not say it themselves.
SORTED_ROUTERS = ("Qwen3MoeForCausalLM", "GptOssForCausalLM")


def expert_ms(profile: DeviceProfile, reads: int) -> float:
    """Time that a plain step spends on reading its `reads` (layer, expert) pairs, some of them still warm."""
    return profile.per_expert_ms * reads - profile.plain_saving_ms


def own_share(profile: DeviceProfile, reads: int, context: float) -> float:
    """Share of that time in a plain step after `context` cached tokens, as the profile's formula has it."""
    rest_ms = profile.fixed_ms + profile.per_token_ms + profile.per_context_ms * context
    return expert_ms(profile, reads) / (rest_ms + expert_ms(profile, reads))


def with_expert_share(profile: DeviceProfile, reads: int, context: float, share: float) -> DeviceProfile:
    """The device if reading experts took `share` (0 to 1) of a plain step and every other cost stayed as it is.

    A plain step reads `reads` = layers * top_k experts after `context` cached tokens. Its time by the formula is R + X with
    R = fixed + per_token + per_context * context and X = per_expert * reads - plain_saving, because what it saves is that its
    experts are still warm. R stays. X' = share / (1 - share) * R gives X' / (R + X') = share. Both parts of X are times of
    reading the same bytes, so both grow alike: per_expert and plain_saving by X' / X. Policies that know no expert's identity
    charge a node with expert_share * plain_ms, the experts of one token: plain_ms' = R / (1 - share), expert_share' = share.

    The share that `ecospec-train profile` measures is larger at the same device: it is the time of the experts modules, of
    which a part does not depend on how many experts are read. UserError if the profile says that experts take no time.
    """
    now_ms = expert_ms(profile, reads)
    if now_ms <= 0.0:
        raise UserError(
            "profile: experts take no time in it, so their share cannot be changed; profile the device again"
        )
    rest_ms = profile.fixed_ms + profile.per_token_ms + profile.per_context_ms * context
    factor = share / (1.0 - share) * rest_ms / now_ms
    return profile.model_copy(
        update={
            "per_expert_ms": factor * profile.per_expert_ms, "plain_saving_ms": factor * profile.plain_saving_ms,
            "plain_ms": rest_ms / (1.0 - share), "expert_share": share,
        }
    )  # fmt: skip


def experts_only(profile: DeviceProfile, reads: int) -> DeviceProfile:
    """A device on which nothing takes time but the reading of experts, one unit each: the trade of the paper alone."""
    costs = [name for name in DeviceProfile.model_fields if name.endswith("_ms")]
    return profile.model_copy(
        update=dict.fromkeys(costs, 0.0) | {"per_expert_ms": 1.0, "plain_ms": float(reads), "expert_share": 1.0}
    )


def mean_context(rows: ReplayRows) -> float:
    """Cached tokens before a position, on average."""
    parts = [prompt.shard.rows()["context"][prompt.first : prompt.first + len(prompt)] for prompt in rows.prompts]
    return float(np.concatenate(parts).mean())


def routing_recall(rows: ReplayRows) -> float:
    """Share of the experts that roots and nodes use which were predicted."""
    hits = used = 0
    for shard in {prompt.shard.index: prompt.shard for prompt in rows.prompts}.values():
        verified = shard.verified()
        hits += int(np.unpackbits(verified["used"] & verified["predicted"]).sum())
        used += int(np.unpackbits(verified["used"]).sum())
    return hits / used


def by_weight(manifest: TraceManifest) -> bool:
    """Whether the expert ids of every token and layer are in falling order of weight."""
    return manifest.routing_by_weight or manifest.target.architecture in SORTED_ROUTERS


class SparserTraces(Traces):
    """Traces as if each token used only the heaviest `top_k` of its experts in each layer.

    A simulation: the text, the states and the acceptance stay those of the denser target, which a target trained with fewer
    experts would not have.
    """

    def __init__(self, traces: Traces, top_k: int) -> None:
        """UserError where the traces do not say which experts are the heaviest."""
        if not by_weight(traces.manifest):
            raise UserError(
                f"{traces.path}: these traces do not hold a token's experts by falling weight; harvest again to cut its routing"
            )
        self.path, self._whole, self._top_k = traces.path, traces, top_k
        target = traces.manifest.target.model_copy(update={"top_k": top_k})
        self.manifest = traces.manifest.model_copy(update={"target": target})

    def shard(self, index: int) -> TraceShard:
        """See `Traces`."""
        shard = self._whole.shard(index)
        return replace(shard, routing=shard.routing[..., : self._top_k])


def sparser_predictor(predictor: Predictor, top_k: int) -> Predictor:
    """The predictor if it named its `top_k` likeliest experts: it was fitted to tell used from unused, not heavy from light."""
    shapes = predictor.shapes.model_copy(update={"top_k": top_k})
    return Predictor(predictor.session, predictor.manifest.model_copy(update={"shapes": shapes}), predictor.acceptance)
