"""Causal LM drafter: any smaller transformers language model with the target's tokenizer, or nearly.

It keeps a cache of its own beside the target's. Row j of a sequence carries the token at position j + 1, so that the prompt's
first token never reaches it: where its tokenizer begins every text with a token of its own (as Llama's does), that one takes
the place, and the drafter sees the whole text; elsewhere (Qwen) it reads the text from the second token on.

The tree is grown level by level over the whole vocabulary, one pass a level, with a mask that shows each node its own path.
Legend: m rows, H hidden size of the target, V vocabulary that is proposed from, i place of a row in the drafter's cache.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ecospec_kernels.draft_propose.reference import Proposals, best_tokens
from ecospec_kernels.draft_tree.reference import Shape, grow, noise_of
from ecospec_runtime.cache import TargetCache
from ecospec_runtime.checkpoint import fingerprint, read_config
from ecospec_runtime.config import PoolConfig
from ecospec_runtime.drafters.base import TreeDrafter, shared_noise
from ecospec_runtime.drafters.features import HiddenRows
from ecospec_runtime.drafters.vocabulary import check_vocabulary
from ecospec_runtime.errors import UserError
from ecospec_runtime.pool import Ints, Pool
from ecospec_runtime.sampling import Sampler
from ecospec_runtime.selfcheck import check
from ecospec_runtime.target import Target

CHUNK = 512  # tokens of one pass over a prompt
FEW = 8  # rows whose logits are all computed, to keep those of the last two


class DraftModel(Target):
    """A language model of any kind behind the passes of `Target`: its masks, its cache, its kernels."""

    role = "drafter"
    needs_experts = False

    def _probe(self) -> int:
        """Prove that a tree can be grown in the cache and rejected rows leave no trace; there is no top-k."""
        check(self)
        return 0


@dataclass
class CausalSequence:
    """What the drafter knows of one text: `tokens` are the rows of its cache, its own first token (if any) before them."""

    hidden: HiddenRows
    cache: TargetCache
    tokens: list[int]
    logits: Tensor | None = None  # [2, V] after the last two rows; zeros stand for a row that is not there

    @property
    def length(self) -> int:
        """Number of rows."""
        return len(self.hidden)


class CausalLMDrafter(TreeDrafter):
    """A language model ready to draft for one target; see `drafters.base.Drafter` for the methods' contract."""

    kind = "causal_lm"
    features = "target_hidden"

    def __init__(self, model: Target, target: Any, digest: str):
        """`digest`: sha256 of the model's weights."""
        self.model, self.source, self.fingerprint = model, model.source, digest
        self.width: int = target.hidden_size
        self.aux_layers: tuple[int, ...] = (target.layers,)
        self._embedded: int = model.model.get_input_embeddings().weight.shape[0]
        self._vocabulary = min(model.vocab_size, target.vocab_size)
        self._ids = np.arange(self._vocabulary)
        self._first = first_tokens(model.tokenizer)
        self._positions: int = getattr(model.config, "max_position_embeddings", None) or sys.maxsize
        self.check(target)

    def check(self, target: Any) -> None:
        """Raise UserError if the tokenizers differ or the states of its pools would not be this target's."""
        check_vocabulary(self.model.tokenizer.get_vocab(), target, f"drafter {self.source}")
        if target.hidden_size != self.width:
            raise UserError(f"drafter {self.source}: loaded for a target of another hidden size; load it again")

    def start(self) -> CausalSequence:
        """An empty sequence."""
        return CausalSequence(HiddenRows(self.width), self.model.new_cache(), [])

    @torch.inference_mode()
    def extend(self, sequence: CausalSequence, tokens_m: Tensor, features_mF: Tensor) -> None:
        """Append m rows; row j pairs the features at position j with the token at position j + 1."""
        tokens = tokens_m.tolist()
        if len(tokens) != len(features_mF):
            raise ValueError(f"{len(tokens)} tokens but {len(features_mF)} feature rows")
        sequence.hidden.append(features_mF)
        if not sequence.tokens:
            tokens = [*self._first, *tokens]
        if len(sequence.tokens) + len(tokens) > self._positions:  # it drafts no more
            sequence.tokens += tokens
            return
        quiet = len(tokens) - 2 if len(tokens) > FEW else 0
        ends = [*range(CHUNK, quiet, CHUNK), quiet] if quiet else []
        for start, end in zip([0, *ends], [*ends, len(tokens)], strict=True):
            past = len(sequence.tokens)
            logits = self._pass(sequence, tokens[start:end], range(past, past + end - start), None, end > quiet)
            sequence.tokens += tokens[start:end]
            if logits is not None:
                before = logits.new_zeros(2, logits.shape[1]) if sequence.logits is None else sequence.logits
                sequence.logits = torch.cat((before, logits))[-2:]

    def pool(
        self, sequence: CausalSequence, root: int, config: PoolConfig, temperatures: tuple[float, ...],
        sampler: Sampler | None,
    ) -> Pool:  # fmt: skip
        """The pool of row `root`, empty where the text is longer than the model can read; the cache is left as it was."""
        at = root + len(sequence.tokens) - len(sequence.hidden)
        if len(sequence.tokens) + config.depth > self._positions:
            return self._nothing(sequence, root, at, temperatures)
        latest = self._root_logits(sequence, at)
        width = min(config.width, self._vocabulary)
        noise = shared_noise(sampler, root, config.depth, self._ids, self.model.device)

        def propose(level: int, states: Tensor) -> Proposals:
            return best_tokens(latest, width, temperatures, noise_of(level, noise))

        def step(level: int, ids_b: Ints, above_bV: Tensor, seen: NDArray[np.bool_]) -> Tensor:
            nonlocal latest
            mask = self._mask(sequence, at + 1, seen)
            logits = self._pass(sequence, ids_b.tolist(), [at + level] * len(ids_b), mask, True)
            assert logits is not None
            latest = logits
            return latest[:, :0]  # nothing of it feeds the next level: the cache does

        nothing = latest[0, :0]
        tree = grow(
            nothing, nothing, Shape(config.depth, config.beam, width, config.min_reach), propose, step, self._ids
        )
        self.model.commit(sequence.cache, len(sequence.tokens), [])
        return Pool(
            root_token=sequence.tokens[at], temperatures=temperatures,
            **tree._asdict() | {"states": sequence.hidden.shown(root)},
        )  # fmt: skip

    @staticmethod
    def _nothing(sequence: CausalSequence, root: int, at: int, temperatures: tuple[float, ...]) -> Pool:
        """An empty pool."""
        none, some = np.zeros(0, np.int64), np.zeros(2, np.float32)
        return Pool(
            tokens=none, parents=none, depths=none, ranks=none, log_probs=some[:0], state_rows=none, entropies=some,
            states=sequence.hidden.shown(root), root_token=sequence.tokens[at], temperatures=temperatures,
            log_normalizers=np.zeros((2, len(temperatures)), np.float32),
        )  # fmt: skip

    def _root_logits(self, sequence: CausalSequence, at: int) -> Tensor:
        """Logits `[2, V]` after row `at` of the cache and the one before it. Those of the last row are at hand."""
        assert sequence.logits is not None
        if at == len(sequence.tokens) - 1:
            return sequence.logits
        rows = range(max(0, at - 1), at + 1)
        mask = self._mask(sequence, rows[0], np.tri(len(rows), dtype=np.bool_))
        logits = self._pass(sequence, sequence.tokens[rows[0] : at + 1], rows, mask, True)
        assert logits is not None
        self.model.commit(sequence.cache, len(sequence.tokens), [])
        return torch.cat((torch.zeros_like(sequence.logits), logits))[-2:]

    def _mask(self, sequence: CausalSequence, visible: int, seen: NDArray[np.bool_]) -> Tensor:
        """Mask `[b, rows + s]`: each of b new rows sees the first `visible` rows of the text and its own of s tree rows."""
        mask = np.zeros((len(seen), len(sequence.tokens) + seen.shape[1]), np.bool_)
        mask[:, :visible] = True
        mask[:, len(sequence.tokens) :] = seen
        return torch.from_numpy(mask).to(self.model.device)

    def _pass(
        self, sequence: CausalSequence, tokens: list[int], positions: Any, mask: Tensor | None, logits: bool
    ) -> Tensor | None:
        """Run the model over tokens at positions: float32 logits `[n, V]` within the target's vocabulary, or None."""
        known = [min(token, self._embedded - 1) for token in tokens]  # ids beyond are the target's padding: no text
        device = self.model.device
        output = self.model.forward(
            torch.tensor(known, device=device), torch.tensor(list(positions), device=device), mask, sequence.cache,
            logits=logits,
        )  # fmt: skip
        return None if output.logits is None else output.logits[:, : self._vocabulary]


def first_tokens(tokenizer: Any) -> list[int]:
    """The begin-of-text token as a list, if the tokenizer puts one before every text; else nothing."""
    begin = tokenizer.bos_token_id
    return [begin] if begin is not None and tokenizer("a")["input_ids"][:1] == [begin] else []


def load_causal_lm(folder: Path, source: str, target: Any, dtype: str = "auto") -> CausalLMDrafter:
    """Load a language model as drafter on the target's device. Raises UserError if it cannot draft for the target.

    `dtype` is float32, bfloat16 or auto.
    """
    try:
        model = DraftModel.from_pretrained(folder, dtype, str(target.device))
    except UserError as error:
        text = str(error)
        kind = ", ".join(read_config(folder, "drafter").get("architectures") or [])
        raise UserError(f"drafter {source} ({kind}){text.removeprefix(f'target {folder}')}") from None
    model.source = source
    return CausalLMDrafter(model, target, fingerprint(folder))
