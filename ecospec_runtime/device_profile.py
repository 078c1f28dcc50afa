"""What a verification pass costs on one device for one target; fitted by `ecospec-train profile`, read by policies."""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from ecospec_runtime.errors import UserError

Milliseconds = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Network = Literal["none", "acceptance", "whole"]  # how much of the predictor a step runs


@lru_cache(maxsize=64)
def cost_groups(layer_costs: tuple[float, ...], experts: int) -> list[tuple[float, int]]:
    """Each different cost, and the bits of the layers that have it."""
    bits = dict.fromkeys(layer_costs, 0)
    for layer, cost in enumerate(layer_costs):
        bits[cost] |= ((1 << experts) - 1) << (layer * experts)
    return list(bits.items())


class DeviceProfile(BaseModel):
    """Pass time in ms: fixed + per_token * n + per_expert * reads + per_context * context, less a saving for n = 1.

    n counts the root; `reads` counts the distinct (layer, expert) pairs that the pass touches, all layers together, each
    weighted by its layer's cost where layers differ.
    """

    model_config = ConfigDict(extra="forbid")

    schema_version: Literal[1] = 1
    device: str  # human-readable name
    slug: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")  # file-name form of device, dtype and threads
    dtype: str
    threads: int = Field(ge=1)
    drafter: str = ""  # fingerprint of the drafter that was timed; files of older releases do not say
    versions: dict[str, str]
    fixed_ms: Milliseconds
    per_token_ms: Milliseconds
    per_expert_ms: Milliseconds
    layer_costs: tuple[
        Annotated[float, Field(ge=0.0, le=1e6)], ...
    ] = ()  # of an expert of each MoE layer, relative to their mean; empty: alike
    per_context_ms: Milliseconds = 0.0  # per cached token
    draft_level_ms: Milliseconds = 0.0  # each further level of the drafter
    draft_node_ms: Milliseconds = 0.0  # each node that is expanded there
    draft_fixed_ms: Milliseconds = 0.0  # catch-up plus first level
    predict_ms: Milliseconds = 0.0  # prediction for a root
    predict_node_ms: Milliseconds = 0.0  # for each node of the pool beside it
    accept_ms: Milliseconds | None = None  # this and the next: of acceptance alone; None, in older files: no less
    accept_node_ms: Milliseconds | None = None
    select_ms: Milliseconds = 0.0
    other_load: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)  # cores that other processes used meanwhile
    heldout_error: float = Field(ge=0.0, allow_inf_nan=False)  # mean relative error on passes the fit has not seen
    plain_ms: float = Field(gt=0.0, allow_inf_nan=False)  # measured plain step, in a run of them
    plain_saving_ms: Milliseconds = 0.0  # what the formula says beyond that: such a step finds experts still warm
    expert_share: float = Field(ge=0.0, le=1.0)  # share of a plain step spent in expert modules, measured

    def reads(self, union: int, experts: int) -> float:
        """What the bit set `union` (bit `layer * experts + expert`) costs, in experts of mean cost."""
        if not self.layer_costs:
            return union.bit_count()
        return sum(cost * (union & layers).bit_count() for cost, layers in cost_groups(self.layer_costs, experts))

    def check_layers(self, layers: int) -> None:
        """UserError if experts were timed for another number of MoE layers."""
        if self.layer_costs and len(self.layer_costs) != layers:
            raise UserError(
                f"device profile {self.slug}: layer_costs of {len(self.layer_costs)} MoE layers, the target has {layers}; profile "
                "this target"
            )

    def pass_ms(self, nodes: int, reads: float, context: int = 0) -> float:
        """Predicted time of a pass over `nodes` tokens (root included) that reads so many experts, see `reads`."""
        fixed_ms = self.fixed_ms - (self.plain_saving_ms if nodes == 1 else 0.0)
        return fixed_ms + self.per_token_ms * nodes + self.per_expert_ms * reads + self.per_context_ms * context

    def predicting_ms(self, nodes: int, network: Network) -> float:
        """Time of running the predictor, or part of it, on the root and a pool of `nodes`; an empty pool needs none."""
        if network == "none" or not nodes:
            return 0.0
        if network == "whole" or self.accept_ms is None or self.accept_node_ms is None:
            return self.predict_ms + self.predict_node_ms * nodes
        return self.accept_ms + self.accept_node_ms * nodes

    def draft_ms(self, levels: int, expanded: int, nodes: int, network: Network = "whole") -> float:
        """Time of catching up, drafting `levels` levels below the root and `expanded` nodes, predicting for a pool of `nodes`,
        selecting."""
        drafting_ms = self.draft_fixed_ms + self.draft_level_ms * (levels - 1) + self.draft_node_ms * expanded
        return drafting_ms + self.predicting_ms(nodes, network) + self.select_ms

    def predicting_for_nothing(self) -> Self:
        """The same device with a predictor that takes no time: what bounds any other."""
        fields = ("predict_ms", "predict_node_ms", "accept_ms", "accept_node_ms")
        return self.model_copy(update=dict.fromkeys(fields, 0.0))
