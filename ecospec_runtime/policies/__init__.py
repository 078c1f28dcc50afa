"""Every selection policy behind one interface, and the text form in which people name them.

`parse_policy("confidence:budget=4,acceptance=raw,depth=4")` gives a `PolicySpec`, `build_policy(spec)` a `Policy`.
"""

from __future__ import annotations

import re
from typing import Any

from pydantic import Field

from ecospec_runtime.acceptance import AcceptanceKind
from ecospec_runtime.config import Config
from ecospec_runtime.errors import UserError
from ecospec_runtime.policies.base import Policy
from ecospec_runtime.policies.confidence import ConfidencePolicy
from ecospec_runtime.policies.off import OffPolicy
from ecospec_runtime.policies.prefix import PrefixPolicy
from ecospec_runtime.policies.ratio import RatioPolicy
from ecospec_runtime.policies.throughput import ThroughputPolicy
from ecospec_runtime.policies.utility import UtilityPolicy

_Kind = (
    type[OffPolicy] | type[ConfidencePolicy] | type[RatioPolicy] | type[PrefixPolicy] | type[UtilityPolicy]
    | type[ThroughputPolicy]
)  # fmt: skip
POLICIES: dict[str, _Kind] = {
    policy.name: policy
    for policy in (OffPolicy, ConfidencePolicy, RatioPolicy, PrefixPolicy, UtilityPolicy, ThroughputPolicy)
}
AS_PUBLISHED = ("off", "confidence", "utility")  # these take the drafter's own probability unless told otherwise

OUTER = ("acceptance", "depth", "min_reach")  # what a policy's text form holds besides its own parameters

__all__ = ["POLICIES", "Policy", "PolicySpec", "build_policy", "parse_policies", "parse_policy"]


class PolicySpec(Config):
    """A policy with everything that decides what it chooses: its parameters, the acceptance model, the pool's depth."""

    name: str
    parameters: dict[str, Any] = Field(default_factory=dict)
    acceptance: AcceptanceKind | None = None  # None: see `acceptance_kind`
    depth: int | None = Field(default=None, ge=1)  # levels of the pool; None: as deep as it was configured
    min_reach: float | None = Field(default=None, ge=0.0, lt=1.0)  # see PoolConfig; None: as it was configured

    def acceptance_kind(self, best: AcceptanceKind) -> AcceptanceKind:
        """The kind to use: as named; else `raw` for those of `AS_PUBLISHED`, `best` for the others."""
        if self.acceptance is not None:
            return self.acceptance
        return "raw" if self.name in AS_PUBLISHED else best

    def __str__(self) -> str:
        """The text form; `parse_policy` reads it back."""
        values: dict[str, Any] = {k: v for k, v in self.parameters.items() if v is not None}
        values |= {k: v for k in OUTER if (v := getattr(self, k)) is not None}
        return self.name + (":" + ",".join(f"{k}={v}" for k, v in values.items()) if values else "")


def build_policy(spec: PolicySpec) -> Policy:
    """The policy of `spec`. UserError on an unknown name, parameter or value, naming the valid ones."""
    if spec.name not in POLICIES:
        raise UserError(f"policy '{spec.name}' is unknown; choose one of {', '.join(POLICIES)}")
    policy = POLICIES[spec.name]
    unknown = spec.parameters.keys() - policy.model_fields.keys()
    if unknown:
        known = ", ".join([*policy.model_fields, *OUTER])
        raise UserError(f"policy '{spec.name}' has no parameter '{min(unknown)}'; it takes {known}")
    return policy.model_validate(spec.parameters)


def parse_policy(text: str) -> PolicySpec:
    """Read `name` or `name:key=value,...`; keys are the policy's parameters and those of `OUTER`. UserError."""
    name, _, rest = text.strip().partition(":")
    values: dict[str, Any] = {}
    for part in filter(None, (p.strip() for p in rest.split(","))):
        key, equals, value = (p.strip() for p in part.partition("="))
        if not equals or not value:
            raise UserError(f"policy '{text}': '{part}' is not key=value, as in confidence:budget=4,acceptance=raw")
        if key in values:
            raise UserError(f"policy '{text}': '{key}' is given twice")
        values[key] = None if value.lower() == "none" else value
    outer = {key: values.pop(key) for key in OUTER if key in values}
    built = build_policy(PolicySpec(name=name, parameters=values))
    return PolicySpec(name=name, parameters={k: v for k, v in built.parameters().items() if k in values}, **outer)


def parse_policies(text: str) -> list[PolicySpec]:
    """Read a comma-separated list such as `off,confidence:budget=4,acceptance=raw,ratio`. UserError.

    `key=value` after a comma belongs to the policy before it.
    """
    entries = re.split(r",(?![^,:]*=)", text)
    return [parse_policy(entry) for entry in entries if entry.strip()]
