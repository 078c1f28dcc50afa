"""N-gram drafter, also called prompt lookup: proposes what followed earlier occurrences of the text's last tokens.

It needs no weights: `--drafter ngram`, or with settings `--drafter ngram:min=1,max=4`, the shortest and longest context that
is looked up (what vLLM calls prompt_lookup_min and prompt_lookup_max, transformers max_matching_ngram_size). Different
continuations of one context become branches of the pool, whose paths are looked up in turn: prompt lookup as a tree.

Probabilities: absolute discounting by one half, interpolated over context lengths. What remains of the shortest context goes
evenly to the whole vocabulary, so that they sum to 1 and unseen tokens keep the share that novelty has had so far.
Source: method D of prediction by partial matching, Howard, "The Design and Analysis of Efficient Lossless Data Compression
Systems", 1993; absolute discounting: Ney, Essen and Kneser, "On structuring probabilistic dependences in stochastic language
modelling", 1994; prompt lookup: Saxena, "Prompt Lookup Decoding", 2023.

Legend: m rows, H hidden size of the target, k tokens seen after a context.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator
from torch import Tensor

from ecospec_runtime.config import Config, PoolConfig
from ecospec_runtime.drafters.base import TreeDrafter
from ecospec_runtime.drafters.features import HiddenRows
from ecospec_runtime.errors import UserError
from ecospec_runtime.pool import Floats, Pool
from ecospec_runtime.sampling import Sampler

NAME = "ngram"
RECENT = 32  # occurrences of a context that count, the latest ones: bounds the cost of a step, and text drifts
DISCOUNT = 0.5  # taken from each distinct continuation's count for the shorter contexts
_VERSION = 2  # of the arithmetic: enters the fingerprint


class NgramConfig(Config):
    """Settings of the n-gram drafter."""

    min: int = Field(default=1, ge=1, le=16)  # tokens of the shortest context that is looked up
    max: int = Field(default=4, ge=1, le=16)  # of the longest

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min > self.max:
            raise UserError(f"NgramConfig: 'min' = {self.min} is above 'max' = {self.max}; lower min or raise max")
        return self


def is_ngram(source: str) -> bool:
    """Whether a drafter's name means this kind; a folder called ngram is written ./ngram."""
    return source.partition(":")[0] == NAME


def parse_ngram(source: str) -> NgramConfig:
    """Settings out of `ngram` or `ngram:min=1,max=4`. Raises UserError naming the key or value at fault."""
    values: dict[str, str] = {}
    for part in filter(None, source.partition(":")[2].split(",")):
        key, equals, value = (text.strip() for text in part.partition("="))
        if not equals or not value or not key or key in values:
            problem = "is given twice" if key in values else "is not key=value"
            raise UserError(f"drafter {source}: '{part}' {problem}; write for example {NAME}:min=1,max=4")
        values[key] = value
    try:
        return NgramConfig.model_validate(values)
    except UserError as error:
        raise UserError(f"drafter {source}: {error}") from None


class Noise(NamedTuple):
    """What is added to the logits of one position, see `Sampler.noise`."""

    values_V: Floats
    mass: float  # sum of exp(values_V)


class Distribution(NamedTuple):
    """Probabilities of the next token over the whole vocabulary: the tokens seen, and one value for each of the others."""

    tokens: list[int]  # [k] by falling probability, then the longest context's latest first
    log_probs: NDArray[np.float64]  # [k]
    others: int  # tokens of the vocabulary that were not seen here
    log_other: float  # log-probability of each of them

    def log_normalizer(self, temperature: float) -> float:
        """log sum_j exp(log p_j / temperature) over the vocabulary."""
        rest = [self.log_other / temperature + np.log(self.others)] if self.others else []
        return float(np.logaddexp.reduce(np.concatenate((self.log_probs / temperature, rest))))

    def entropy(self) -> float:
        """In nats."""
        seen = -float(np.exp(self.log_probs) @ self.log_probs)
        return seen - self.others * float(np.exp(self.log_other)) * self.log_other

    def with_noise(self, noise: Noise | None) -> Distribution:
        """The distribution of the logits plus noise; the tokens not seen share the mean of what that makes of theirs."""
        if noise is None:
            return self
        added = noise.values_V[self.tokens].astype(np.float64)
        scores = self.log_probs + added
        rest = []
        if self.others:
            mass = max(noise.mass - np.exp(added).sum(), np.finfo(np.float64).tiny)
            rest = [self.log_other + np.log(mass)]
        total = np.logaddexp.reduce(np.concatenate((scores, rest)))
        order = np.argsort(-scores, kind="stable")
        log_other = float(rest[0] - total - np.log(self.others)) if rest else self.log_other
        return Distribution([self.tokens[i] for i in order], scores[order] - total, self.others, log_other)


class Followers:
    """What followed one context: the last `RECENT` tokens, and how often each of them, the latest to occur last."""

    __slots__ = ("counts", "latest")

    def __init__(self) -> None:
        self.latest: list[int] = []  # not a deque, which takes 600 bytes from the start
        self.counts: dict[int, int] = {}

    def add(self, token: int) -> None:
        """Take in the next one, forgetting the oldest beyond `RECENT`."""
        self.latest.append(token)
        self.counts[token] = self.counts.pop(token, 0) + 1
        if len(self.latest) > RECENT:
            oldest = self.latest.pop(0)
            self.counts[oldest] -= 1
            if not self.counts[oldest]:
                del self.counts[oldest]


class NgramIndex:
    """A text read token by token: for each context of min..max tokens, the last `RECENT` tokens that followed it."""

    def __init__(self, config: NgramConfig, vocabulary: int):
        self._config, self._vocabulary = config, vocabulary
        self._followers: dict[tuple[int, ...], Followers] = {}
        self._end: list[int] = []  # the last `max` tokens
        self.length = 0

    def read(self, token: int) -> None:
        """Take in the next token: O(max), whatever the length of the text."""
        end = self._end
        for n in range(self._config.min, len(end) + 1):
            context = tuple(end[-n:])
            if context not in self._followers:
                self._followers[context] = Followers()
            self._followers[context].add(token)
        end.append(token)
        del end[: -self._config.max]
        self.length += 1

    def after(self, path: list[int]) -> Distribution:
        """The distribution after the text and `path`; no tokens if the text never held even their shortest context."""
        context = [*self._end, *path][-self._config.max :]
        found = []
        for n in range(self._config.min, len(context) + 1):
            followers = self._followers.get(tuple(context[-n:]))
            if followers is None:
                break  # a longer context holds this one
            found.append(followers)
        share, p = 1.0, dict[int, float]()
        for followers in reversed(found):
            part = share / len(followers.latest)
            for token, count in reversed(followers.counts.items()):
                p[token] = p.get(token, 0.0) + part * (count - DISCOUNT)
            share = part * len(followers.counts) * DISCOUNT
        other = share / self._vocabulary
        tokens = sorted(p, key=p.__getitem__, reverse=True)
        log_probs = np.log(np.array([p[token] for token in tokens]) + other)
        return Distribution(tokens, log_probs, self._vocabulary - len(p), float(np.log(other)))


@dataclass
class NgramSequence:
    """What the drafter was told of one text. The index has read the rows up to some root, which may lie behind the last."""

    hidden: HiddenRows
    index: NgramIndex
    before: Distribution | None = None  # what the index said before it read its last token
    tokens: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Number of rows."""
        return len(self.tokens)


class NgramDrafter(TreeDrafter):
    """Looks up contexts in prompt and generated text; see `drafters.base.Drafter` for the methods' contract.

    The prompt's first token is not among its rows, so no context holds it.
    """

    kind = NAME
    features = "target_hidden"

    def __init__(self, config: NgramConfig, target: Any, source: str = NAME):
        """For a loaded target, whose last hidden states its pools carry."""
        self.config, self.source = config, source
        self.width: int = target.hidden_size
        self.aux_layers: tuple[int, ...] = (target.layers,)
        self._vocabulary: int = target.vocab_size
        settings = f"{NAME} {_VERSION} {config.model_dump_json()} {RECENT} {DISCOUNT}"
        self.fingerprint = hashlib.sha256(settings.encode()).hexdigest()

    def check(self, target: Any) -> None:
        """Fits every target of the same hidden size and vocabulary."""
        if (target.hidden_size, target.vocab_size) != (self.width, self._vocabulary):
            raise UserError(
                f"drafter {self.source}: made for a target of another hidden size or vocabulary; load it again"
            )

    def start(self) -> NgramSequence:
        """An empty sequence."""
        return NgramSequence(HiddenRows(self.width), self._index())

    def extend(self, sequence: NgramSequence, tokens_m: Tensor, features_mF: Tensor) -> None:
        """Append m rows; row j pairs the features at position j with the token at position j + 1."""
        tokens = tokens_m.tolist()
        if len(tokens) != len(features_mF):
            raise ValueError(f"{len(tokens)} tokens but {len(features_mF)} feature rows")
        sequence.hidden.append(features_mF)
        sequence.tokens += tokens

    def _index(self) -> NgramIndex:
        return NgramIndex(self.config, self._vocabulary)

    def pool(
        self, sequence: NgramSequence, root: int, config: PoolConfig, temperatures: tuple[float, ...],
        sampler: Sampler | None,
    ) -> Pool:  # fmt: skip
        """The pool of row `root`."""
        before = self._read_to(sequence, root)

        def noise(level: int) -> Noise | None:
            if sampler is None or sampler.greedy:
                return None
            values_V = sampler.noise(root + 1 + level, self._vocabulary)
            return Noise(values_V, float(np.exp(values_V.astype(np.float64)).sum()))

        nodes, proposed, levels = grow(sequence.index, config, noise)
        states = [before.with_noise(noise(0)), *proposed]
        tokens, parents, depths, ranks, rows = (np.array([node[i] for node in nodes], np.int64) for i in range(5))
        normalizers = [[one.log_normalizer(t) for t in temperatures] for one in states]
        return Pool(
            tokens=tokens, parents=parents, depths=depths, ranks=ranks, state_rows=rows,
            log_probs=np.array([node.log_prob for node in nodes], np.float32), states=sequence.hidden.shown(root),
            entropies=np.array([one.entropy() for one in states], np.float32), root_token=sequence.tokens[root],
            temperatures=temperatures, levels=levels,
            log_normalizers=np.array(normalizers, np.float32).reshape(len(states), len(temperatures)),
        )  # fmt: skip

    def _read_to(self, sequence: NgramSequence, root: int) -> Distribution:
        """Bring the index to row `root`; returns what it said before that row's token."""
        if sequence.index.length > root + 1:
            sequence.index = self._index()
        while sequence.index.length <= root:
            if sequence.index.length == root:
                sequence.before = sequence.index.after([])
            sequence.index.read(sequence.tokens[sequence.index.length])
        assert sequence.before is not None
        return sequence.before


class Node(NamedTuple):
    """A node of a pool under construction; named as in `Pool`, but for `reach`."""

    token: int
    parent: int
    depth: int
    rank: int
    state_row: int
    log_prob: float
    reach: float  # sum of log p along the path, in the order and precision that replay adds it up


def grow(
    index: NgramIndex, shape: PoolConfig, noise: Callable[[int], Noise | None] = lambda level: None
) -> tuple[list[Node], list[Distribution], int]:
    """The tree after the index's text in the shape that `PoolConfig` describes, level by level, ties in order of discovery.

    `noise` gives what is added to the logits of a level's tokens; the first is level 1. Returns the nodes, the
    distributions of the root and of every expanded node, and the levels grown.
    """
    least = float(np.log(np.float32(shape.min_reach))) if shape.min_reach else -np.inf
    nodes: list[Node] = []
    paths: dict[int, list[int]] = {-1: []}  # tokens from below the root to a node that is expanded, its own included
    proposed: list[Distribution] = []
    expanding, levels = [-1], 0
    while expanding and levels < shape.depth:
        levels += 1
        children: list[Node] = []
        added = noise(levels)
        for parent in expanding:
            found = index.after(paths[parent]).with_noise(added)
            proposed.append(found)
            values = found.log_probs[: shape.width].astype(np.float32)
            reach = values + np.float32(nodes[parent].reach if parent >= 0 else 0.0)
            for rank, child in enumerate(zip(found.tokens, values.tolist(), reach.tolist(), strict=False)):
                children.append(Node(child[0], parent, levels, rank, len(proposed), child[1], child[2]))
        children.sort(key=attrgetter("reach"), reverse=True)  # stable: equal ones keep their order
        kept = [child for child in children[: shape.width] if child.reach >= least]
        expanding = list(range(len(nodes), len(nodes) + len(kept[: shape.beam])))
        nodes += kept
        for place in expanding:
            paths[place] = [*paths[nodes[place].parent], nodes[place].token]
    return nodes, proposed, levels
