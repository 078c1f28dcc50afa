"""The decoding loop: draft, score, select, verify, commit.

    engine = Engine.from_bundle("bundle")
    for token in engine.generate("def fibonacci(n):"): print(token.text, end="")

All state of one decode lives in a `Sequence`; the engine itself holds models, settings and what its decodes have shown of
drafting (`Gate`). Legend of shapes: n rows of a pass (root first, then the chosen nodes), F width of the drafter's features.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ecospec_runtime.cache import TargetCache
from ecospec_runtime.config import GenerationConfig, PoolConfig
from ecospec_runtime.console import note
from ecospec_runtime.device_profile import DeviceProfile
from ecospec_runtime.errors import UserError
from ecospec_runtime.gate import Gate
from ecospec_runtime.mxfp4 import dtype_name
from ecospec_runtime.placement import Placement
from ecospec_runtime.policies.base import Pausing, Policy, deepest, gate_of
from ecospec_runtime.pool import Pool
from ecospec_runtime.prompts import Prompt
from ecospec_runtime.sampling import Sampler
from ecospec_runtime.scoring import Scorer, network_for
from ecospec_runtime.sequence import Prefilled, Sequence
from ecospec_runtime.statistics import PassRecord, Statistics
from ecospec_runtime.stopping import Reason, TextStream, Token
from ecospec_runtime.target import Target
from ecospec_runtime.verify import Walk, follow, tree_mask

if TYPE_CHECKING:
    from ecospec_runtime.bundle import Bundle
    from ecospec_runtime.drafters.base import Drafter
    from ecospec_runtime.policies import PolicySpec

PREFILL_CHUNK = 512  # tokens of one prefill pass


class Stream(Iterator[Token]):
    """Iterator over emitted tokens. `statistics` and `reason` (length, eos or stop) are final when it is exhausted."""

    def __init__(self, engine: Engine, sequence: Sequence):
        self._engine, self._sequence = engine, sequence
        self._ready: deque[Token] = deque()

    @property
    def statistics(self) -> Statistics:
        """Counts and timings so far."""
        return self._sequence.statistics

    @property
    def reason(self) -> Reason | None:
        """Why the text ended; None while it has not."""
        return self._sequence.text.reason

    def __next__(self) -> Token:
        sequence = self._sequence
        while not self._ready:
            if sequence.text.reason:
                raise StopIteration
            if sequence.past == 0:
                self._engine.prefill(sequence)
            self._ready.extend(self._engine.step(sequence))
        return self._ready.popleft()


class Engine:
    """A target with what speculates for it. Not thread-safe: the target runs one pass at a time."""

    def __init__(
        self, target: Target, drafter: Drafter | None = None, scorer: Scorer | None = None, policy: Policy | None = None,
        profile: DeviceProfile | None = None, pool: PoolConfig | None = None, *, depth: int | None = None,
        min_reach: float | None = None, record_routing: bool = False, reason: str = "",
    ):  # fmt: skip
        """`depth` and `min_reach` cut the pool; `policy` None is `off`; `reason` says in one line why a bundle chose the policy.

        `record_routing` fills the statistics' expert counts and steps, at the cost of a hook per MoE layer.
        """
        if policy is None:
            from ecospec_runtime.policies.off import OffPolicy

            policy = OffPolicy()
        self.target, self.drafter, self.policy, self.profile = target, drafter, policy, profile
        self.scorer = scorer or Scorer(None, "raw", target.moe_layers, target.experts)
        self.pool = pool or PoolConfig()
        self.record_routing, self.reason = record_routing, reason
        self._gates: dict[float, Gate] = {}  # by sampling temperature
        self.shape = self.pool.cut(depth, min_reach).cut(deepest(policy))
        if policy.drafts and drafter is None:
            raise UserError(f"policy '{policy.name}' needs a drafter; pass one, or use policy 'off'")
        if policy.needs_routing and self.scorer.predictor is None:
            raise UserError(f"policy '{policy.name}' needs a predictor; pass a bundle, or use 'confidence' or 'off'")
        if profile is None and getattr(policy, "needs_profile", False):
            raise UserError(
                f"policy '{policy.name}' needs a device profile; run `ecospec-train profile` on this machine"
            )
        if profile is not None:
            profile.check_layers(target.moe_layers)
        self._pausing = policy if isinstance(policy, Pausing) else None
        self._network = network_for(self.scorer.kind, policy.needs_routing)
        self._aux = drafter.aux_layers if drafter is not None and policy.drafts else ()

    @classmethod
    def from_bundle(
        cls, bundle: str | Path | Bundle, target: str | Path | Target | None = None,
        drafter: str | Path | Drafter | None = None, policy: str | PolicySpec = "auto", dtype: str = "auto",
        device: str | Placement | None = None, threads: int | None = None,
    ) -> Engine:  # fmt: skip
        """Load a bundle with its target and drafter (by default the ones it names) and check that they belong together.

        `policy` "auto" is what was tuned for this device, or a fallback with a warning: `Bundle.policy_for`. `threads` sets
        torch's number of threads; None keeps it, unless the bundle was tuned on this device for another number only, which
        is then set. Raises UserError naming what is missing or does not fit.
        """
        from ecospec_runtime.bundle import check_drafter, check_target, drafter_of, load_bundle
        from ecospec_runtime.drafters import load_drafter
        from ecospec_runtime.policies import build_policy, parse_policy

        if threads is not None:
            torch.set_num_threads(threads)
        if isinstance(bundle, str | Path):
            bundle = load_bundle(bundle)
        if not isinstance(target, Target):
            target = Target.from_pretrained(target or bundle.manifest.target.id, dtype, device)
        check_target(bundle, target)
        if drafter is None or isinstance(drafter, str | Path):
            loaded = load_drafter(str(drafter or drafter_of(bundle, target)), target, dtype)
        else:
            loaded = drafter
        check_drafter(bundle, loaded)
        name, kept = target.hardware, dtype_name(target)
        tuned_for = bundle.tuned_threads(name, kept)
        if threads is None and tuned_for and torch.get_num_threads() not in tuned_for:
            torch.set_num_threads(tuned_for[0])
        picked = bundle.policy_for(name, kept, torch.get_num_threads())
        if policy == "auto":
            spec, reason = picked.spec, picked.reason
        else:
            spec = parse_policy(policy) if isinstance(policy, str) else policy
            reason = "named by the caller"
        costed = picked.profile is not None and getattr(build_policy(spec), "needs_profile", False)
        if picked.warning and (policy == "auto" or costed):
            note(f"warning: {picked.warning}")
        scorer = Scorer(bundle.predictor(), "raw", target.moe_layers, target.experts)
        base = cls(target, loaded, scorer, None, picked.profile, bundle.manifest.pool)
        return base.with_policy(spec, reason)

    def with_policy(self, policy: str | PolicySpec, reason: str = "") -> Engine:
        """An engine with this one's models and profile, fresh gates and another policy, e.g. "confidence:budget=4"."""
        from ecospec_runtime.policies import build_policy, parse_policy

        spec = parse_policy(policy) if isinstance(policy, str) else policy
        predictor = self.scorer.predictor
        kind = spec.acceptance_kind(predictor.acceptance.best if predictor is not None else "raw")
        scorer = Scorer(predictor, kind, self.target.moe_layers, self.target.experts)
        return Engine(
            self.target, self.drafter, scorer, build_policy(spec), self.profile, self.pool, depth=spec.depth,
            min_reach=spec.min_reach, record_routing=self.record_routing, reason=reason,
        )  # fmt: skip

    def generate(
        self, prompt: str | list[int] | Prefilled, config: GenerationConfig | None = None
    ) -> Stream:  # fmt: skip
        """Decode after `prompt` (text, or token ids). Returns at once; passes run as the stream is consumed.

        A `Prefilled` prompt is read already; starting another decode on it ends the one before.
        """
        config = config or GenerationConfig()
        read = prompt if isinstance(prompt, Prefilled) else None
        ids = read.prompt if read is not None else self._encode(prompt)  # type: ignore[arg-type]
        eos = config.eos_token_id
        ends = self.target.eos_token_ids() if eos is None else (eos,) if isinstance(eos, int) else eos
        sampler = Sampler(config)
        sequence = Sequence(
            prompt=ids, sampler=sampler, root=ids[-1], scorer=self.scorer.at(config.temperature), cache=self.target.new_cache() if read is None else read.cache,
            text=TextStream(self.target.tokenizer, ids, config.max_new_tokens, ends, config.stop_strings),
            draft_state=self.drafter.start() if self.drafter is not None and self.policy.drafts else None,
            seen=set(ids) if sampler.penalises else set(),
            gate=self._gates.setdefault(config.temperature, gate_of(self.policy, self.shape.depth)),
            statistics=Statistics(prompt_tokens=len(ids)),
        )  # fmt: skip
        if read is not None:
            sequence.past = len(ids) - 1
            self.target.commit(read.cache, sequence.past, [])
            if self._follows(sequence) and sequence.past:
                sequence.behind_tokens, sequence.behind_features = ids[1:], list(read.features)
                self._catch_up(sequence)
        return Stream(self, sequence)

    def prefilled(self, prompt: str | list[int]) -> Prefilled:
        """Read a prompt once, for decodes under this engine's policy and any other that shares its models."""
        read = Prefilled(self._encode(prompt), self.target.new_cache(), [])
        aux_layers = self.drafter.aux_layers if self.drafter is not None else ()
        done = 0
        for end, aux in self._read(read.prompt, read.cache, aux_layers):
            read.features.append(torch.zeros(end - done, 0) if aux is None else aux)
            done = end
        return read

    def _encode(self, prompt: str | list[int]) -> list[int]:
        tokenizer = self.target.tokenizer
        ids = Prompt(prompt).encode(tokenizer) if isinstance(prompt, str) else list(prompt)
        if not ids and tokenizer.bos_token_id is not None:
            ids = [tokenizer.bos_token_id]
        if not ids:
            raise UserError("the prompt is empty and the tokenizer has no begin-of-text token; give at least one token")
        if not 0 <= min(ids) <= max(ids) < self.target.vocab_size:
            raise UserError(f"the prompt holds token ids outside 0..{self.target.vocab_size - 1} of this target")
        longest = getattr(self.target.config, "max_position_embeddings", None)
        if longest and len(ids) > longest:
            raise UserError(f"the prompt has {len(ids)} tokens, this target takes {longest}; shorten it")
        return ids

    def prefill(self, sequence: Sequence) -> None:
        """Cache the prompt up to its last token, which is the first root; the drafter follows along."""
        started = perf_counter()
        follows = self._follows(sequence)
        for end, aux in self._read(sequence.prompt, sequence.cache, self._aux if follows else ()):
            if follows:
                self._remember(sequence, sequence.prompt[sequence.past + 1 : end + 1], aux)
                self._catch_up(sequence)
            sequence.past = end
        sequence.statistics.prefill_seconds += perf_counter() - started

    def _read(
        self, prompt: list[int], cache: TargetCache, aux_layers: tuple[int, ...]
    ) -> Iterator[tuple[int, Tensor | None]]:
        """Run all but the last token of a prompt in chunks; yields the tokens cached so far and the chunk's features."""
        device = self.target.device
        for start in range(0, len(prompt) - 1, PREFILL_CHUNK):
            end = min(start + PREFILL_CHUNK, len(prompt) - 1)
            output = self.target.forward(
                torch.tensor(prompt[start:end], device=device), torch.arange(start, end, device=device), None,
                cache, aux_layers=aux_layers, logits=False,
            )  # fmt: skip
            yield end, output.aux

    def step(self, sequence: Sequence) -> list[Token]:
        """One pass: advance the sequence by at least one token. Returns the tokens that became certain."""
        started = perf_counter()
        statistics, context = sequence.statistics, sequence.past
        drafts = self._drafts_now(sequence)
        tokens, parents = self._propose(sequence) if drafts else ([], [])
        drafted = perf_counter()
        outcome = self._verify(sequence, tokens, parents)
        sequence.root = outcome.tokens[-1]
        if drafts:
            sequence.gate.verified(len(outcome.rows) - 1)
        statistics.passes += 1
        statistics.verified += len(tokens)
        statistics.accepted += len(outcome.rows) - 1
        emitted, count = self._emit(sequence, outcome)
        if self.record_routing:
            statistics.seen.append(PassRecord(context, drafts, tuple(tokens), tuple(parents), len(outcome.rows) - 1,
                                              tuple(outcome.tokens[:count])))  # fmt: skip
        finished = perf_counter()
        statistics.verify_seconds += finished - drafted
        statistics.seconds += finished - started
        return emitted

    def _drafts_now(self, sequence: Sequence) -> bool:
        """Whether the drafter runs for this pass."""
        if sequence.text.room < 2 or not sequence.past:  # no past, a one-token prompt: the drafter knows nothing yet
            return False
        return (self._follows(sequence) or sequence.gate.wait > 0) and sequence.gate.passes()

    def _follows(self, sequence: Sequence) -> bool:
        """Whether the drafter must know this text: not once its gate rests longer than the text lasts, which is then forgotten."""
        if sequence.draft_state is not None and sequence.gate.wait >= sequence.text.room - 1:
            sequence.draft_state, sequence.behind_tokens, sequence.behind_features = None, [], []
        return sequence.draft_state is not None

    def _propose(self, sequence: Sequence) -> tuple[list[int], list[int]]:
        """Draft, score and select: tokens of the chosen nodes and the row of each one's parent."""
        assert self.drafter is not None
        statistics = sequence.statistics
        start = perf_counter()
        self._catch_up(sequence)
        shape = self.shape if sequence.gate.depth is None else self.shape.cut(sequence.gate.depth)
        pool = self.drafter.expand(
            sequence.draft_state, sequence.root, shape, sequence.scorer.temperatures, sequence.sampler
        )
        drafted = scored = perf_counter()
        chosen: list[int] = []
        candidates = None
        if len(pool):
            candidates = sequence.scorer.score(pool, self.target.embed_host, self.policy.needs_routing)
            scored = perf_counter()
            chosen = self.policy.select(candidates, self.profile, sequence.past)  # type: ignore[arg-type]
        tokens, parents = self._checked(pool, chosen)
        if self._pausing is not None and self.profile is not None:
            drafting = self.profile.draft_ms(pool.levels, pool.expanded, len(pool), self._network)
            sequence.gate.record(self._pausing.outlook(candidates, chosen, self.profile, drafting))
        statistics.drafts += 1
        statistics.draft_seconds += drafted - start
        statistics.predict_seconds += scored - drafted
        statistics.select_seconds += perf_counter() - scored
        return tokens, parents

    def _checked(self, pool: Pool, chosen: list[int]) -> tuple[list[int], list[int]]:
        """Tokens and parent rows of the chosen nodes. ValueError if the set is not closed, or not of this pool."""
        all_tokens, all_parents = pool.tokens.tolist(), pool.parents.tolist()
        row_of = {-1: 0}
        tokens, parents = [], []
        for node in sorted(chosen):
            if node >= len(all_tokens) or node in row_of or all_parents[node] not in row_of:
                raise ValueError(f"policy '{self.policy.name}' chose an invalid tree: node {node} of {sorted(chosen)}")
            row_of[node] = len(row_of)
            tokens.append(all_tokens[node])
            parents.append(row_of[all_parents[node]])
        if tokens and not 0 <= min(tokens) <= max(tokens) < self.target.vocab_size:
            raise ValueError(f"the drafter proposed token ids outside 0..{self.target.vocab_size - 1}")
        return tokens, parents

    def _verify(self, sequence: Sequence, tokens: list[int], parents: list[int]) -> Walk:
        """Run the target over root and chosen nodes, walk, commit the accepted path, remember its features."""
        past, device = sequence.past, self.target.device
        mask: Tensor | None = None
        depths = [0]
        if tokens:
            mask = tree_mask(parents, past).to(device)
            for parent in parents:
                depths.append(depths[parent] + 1)
        output = self.target.forward(
            torch.tensor([sequence.root, *tokens], device=device), torch.tensor(depths, device=device) + past, mask,
            sequence.cache, aux_layers=() if sequence.draft_state is None else self._aux, routing=self.record_routing,
        )  # fmt: skip
        assert output.logits is not None
        outcome = follow(output.logits, tokens, parents, sequence.sampler, past + 1, sequence.seen)
        if tokens:
            self.target.commit(sequence.cache, past, outcome.rows)
        sequence.past = past + len(outcome.rows)
        if sequence.draft_state is not None:
            aux = output.aux
            if aux is not None and len(outcome.rows) != len(aux):
                aux = aux[outcome.rows]
            self._remember(sequence, outcome.tokens, aux)
        if self.record_routing:
            sequence.statistics.recorded.append(output.routing_layers)
        return outcome

    def _emit(self, sequence: Sequence, outcome: Walk) -> tuple[list[Token], int]:
        """Pass the chosen tokens through the stop rules, how many of them; those past the end are forgotten."""
        ready: list[Token] = []
        for count, token in enumerate(outcome.tokens, start=1):
            ready += sequence.text.push(token, outcome.logprobs[count - 1] if outcome.logprobs else None)
            if sequence.text.reason:
                break
        sequence.statistics.tokens += len(ready)
        return ready, count

    def _remember(self, sequence: Sequence, tokens: list[int], aux: Tensor | None) -> None:
        """Queue rows (feature at position i, token at i + 1) for the drafter, which may be paused."""
        sequence.behind_tokens += tokens
        sequence.behind_features.append(torch.zeros(len(tokens), 0) if aux is None else aux)

    def _catch_up(self, sequence: Sequence) -> None:
        """Give the drafter the rows it is behind."""
        if not sequence.behind_tokens:
            return
        assert self.drafter is not None
        features = sequence.behind_features
        self.drafter.extend(
            sequence.draft_state, torch.tensor(sequence.behind_tokens, device=self.target.device),
            features[0] if len(features) == 1 else torch.cat(features),
        )  # fmt: skip
        sequence.behind_tokens, sequence.behind_features = [], []
