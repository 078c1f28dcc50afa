"""Acceptance probability of every pool node, given that its parent was accepted.

Four kinds, in rising order of power: `raw` is the drafter's own p; `temperature` re-reads the drafter's
logits at one fitted temperature; `logistic` has a logit linear in log p, rank, depth and entropy; `head` adds to it what the
predictor's network has learned. Siblings share a softmax with "none of these" (logit 0) and so sum to at most 1. Above
temperature 0 a pool's log p already holds the noise of the draw (see `sampling`); temperature and logistic are those of the
text's own sampling temperature where traces of several were fitted on, and the head's correction is added to the latter.
The arithmetic is the op `accept_tree`; importing this is cheap. What was fitted lives in a predictor folder's `acceptance.json`. What each kind is worth, and
what was tried and left out: docs/acceptance.md, docs/method.md.

Legend: n nodes, s drafter states, t temperatures.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from ecospec_kernels.accept_tree.reference import NONE
from ecospec_runtime.config import read_model
from ecospec_runtime.pool import Floats, Pool

AcceptanceKind = Literal["raw", "temperature", "logistic", "head"]
KINDS: tuple[AcceptanceKind, ...] = get_args(AcceptanceKind)
TEMPERATURES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.85, 1.0, 1.25)
PROBABILITY_FLOOR = 1e-6
FILE = "acceptance.json"


class LogisticWeights(BaseModel):
    """Logit of acceptance = bias + log_p * x0 + rank * x1 + depth * x2 + entropy * x3, over `scalars_of`."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    log_p: float = 1.0
    rank: float = 0.0
    depth: float = 0.0
    entropy: float = 0.0
    bias: float = 0.0

    def vector(self) -> NDArray[np.float32]:
        """The four weights in the order of `scalars_of`."""
        return self.array()[:4]

    def array(self) -> Floats:
        """The weights in that order, and the bias."""
        return np.array([self.log_p, self.rank, self.depth, self.entropy, self.bias], np.float32)

    def toward(self, other: LogisticWeights, share: float) -> LogisticWeights:
        """The logistic `share` of the way to another one."""
        ends = zip(self.model_dump().items(), other.model_dump().values(), strict=True)
        return LogisticWeights(**{name: here + share * (there - here) for (name, here), there in ends})


class Calibration(BaseModel):
    """What needs no network, as fitted on text of one sampling temperature."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    temperature: float = Field(gt=0)  # tau of kind `temperature`, a member of TEMPERATURES
    logistic: LogisticWeights
    head_share: float = Field(default=1.0, ge=0)  # of the network's correction that kind `head` takes
    log_loss: dict[str, float] = Field(default_factory=dict)  # held-out log loss in nats per kind


class AcceptanceModel(Calibration):
    """Contents of `acceptance.json`: every fitted kind, and which did best on held-out text.

    The fields of `Calibration` are of the text that most was learned from, of sampling temperature `fitted_at`.
    """

    schema_version: Literal[3] = 3
    best: AcceptanceKind
    fitted_at: float = Field(default=0.0, ge=0)
    sampled: dict[float, Calibration] = Field(default_factory=dict)  # by the sampling temperature of further text
    base: LogisticWeights | None = Field(
        default=None, exclude=True
    )  # that the head starts from, where it is not `logistic`

    @classmethod
    def load(cls, folder: Path) -> AcceptanceModel:
        """Read `acceptance.json` of a predictor folder; UserError if it is missing or malformed."""
        return read_model(Path(folder) / FILE, cls, "run `ecospec-train fit` again")

    def at(self, sampling: float) -> Self:
        """The model of text of a sampling temperature: between two that were fitted logistic and share are interpolated, beyond them
        and for kind `temperature` the nearest serves."""
        if not self.sampled:
            return self
        known: dict[float, Calibration] = {**self.sampled, self.fitted_at: self}
        nearest = min(known, key=lambda fitted: abs(fitted - sampling))
        below = max((t for t in known if t <= sampling), default=nearest)
        above = min((t for t in known if t > sampling), default=below)
        share = (sampling - below) / (above - below) if above > below else 0.0
        low, high = known[below], known[above]
        found = {"temperature": known[nearest].temperature, "logistic": low.logistic.toward(high.logistic, share),
                 "head_share": low.head_share + share * (high.head_share - low.head_share), "base": self.logistic}  # fmt: skip
        return self.model_copy(update=found | {"fitted_at": sampling, "sampled": {}})


def logistic_logits(scalars_n4: Floats, weights: LogisticWeights) -> Floats:
    """Logits of kind `logistic` `[n]` from node scalars (root row left out)."""
    with np.errstate(over="ignore", invalid="ignore"):  # of odd drafters; the caller takes care of NaN
        return scalars_n4 @ weights.vector() + np.float32(weights.bias)


def head_logits(logits: Floats, scalars_n4: Floats, model: AcceptanceModel) -> Floats:
    """Logits of kind `head` `[n]` from the network's: so much of its correction on top of the logistic of the text's temperature."""
    if model.base is None:
        return logits
    with np.errstate(over="ignore", invalid="ignore"):
        further = logits - logistic_logits(scalars_n4, model.base)
        return logistic_logits(scalars_n4, model.logistic) + np.float32(model.head_share) * further


def acceptance(
    pool: Pool, kind: AcceptanceKind, model: AcceptanceModel | None, logits: Floats | None = None
) -> Floats:  # fmt: skip
    """Acceptance of every node `[n]`, in [0, 1].

    `logits` `[n]` are the predictor's acceptance logits, for kind `head`. A non-finite estimate counts as unknown: the
    drafter's own probability stands in.
    """
    weights, given, tau, normalizers = NONE, NONE, 1.0, NONE
    if kind == "head":
        assert logits is not None
        given = logits
        if model is not None and model.base is not None:
            share = np.float32(model.head_share)
            given, weights = share * logits, model.logistic.array() - share * model.base.array()
    elif kind != "raw" and len(pool):
        assert model is not None
        if kind == "logistic":
            weights = model.logistic.array()
        else:
            tau = model.temperature
            normalizers = pool.log_normalizers[:, pool.temperatures.index(tau)]
    from ecospec_kernels import dispatch  # which imports torch

    accepted: Floats = dispatch.accept_tree(pool, weights, given, tau, normalizers)
    return accepted
