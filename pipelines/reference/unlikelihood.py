"""Teach the reference target not to loop: likelihood on text and, on its own greedy text, unlikelihood of loops.

    python -m pipelines.reference.unlikelihood --corpus runs/reference/corpus --init runs/reference/base \
        --out runs/reference/target --minutes 31

Small language models repeat themselves under greedy decoding, and loops flatter every figure of speculative decoding. Every
`--every`th step continues prefixes of training windows greedily; where the continuation repeats a third time what it has said
twice (periods up to `LONGEST`; `ecospec_runtime.statistics.loop_share` counts up to 16), -log(1 - p) of the repeated token is
added to the loss. It is mixed into a long run of ordinary training: alone it unlearns more than loops. Source: the sequence-level loss of Welleck et al., "Neural Text Generation with Unlikelihood Training", arXiv
1908.04319, on loops in place of repeated 4-grams, which code is full of.

Shapes: B sequences, T positions.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import GenerationConfig, Qwen3MoeForCausalLM

from pipelines.reference.target import TargetModule, arguments, load_target, prepare, train

LONGEST = 32  # tokens of a loop's period
PREFIX, CONTINUED = 96, 96  # tokens at the start of a window, and after them
FULL = 0.1  # looped share from which the unlikelihood weighs as much as the likelihood; below it, in proportion


def third_time(ids_BT: Tensor, longest: int = LONGEST) -> Tensor:
    """Tokens that say something for at least the third time in a row: bool `[B, T]`."""
    marks = torch.zeros_like(ids_BT, dtype=torch.bool)
    positions = torch.arange(ids_BT.size(1))
    for period in range(1, min(longest, (ids_BT.size(1) - 1) // 2) + 1):
        same = torch.zeros_like(marks)
        same[:, period:] = ids_BT[:, period:] == ids_BT[:, :-period]
        broken = torch.where(same, -1, positions).cummax(1).values  # last position that broke the repeat
        marks |= positions - broken > period
    return marks


@torch.no_grad()
def continue_greedily(model: Qwen3MoeForCausalLM, ids_BT: Tensor, tokens: int) -> Tensor:
    """`ids_BT` followed by `tokens` greedy tokens; never the end of the text, which would be a way out of a loop."""
    end = model.config.eos_token_id
    config = GenerationConfig(max_new_tokens=tokens, do_sample=False, use_cache=True, suppress_tokens=[end])
    return model.generate(ids_BT, generation_config=config, attention_mask=torch.ones_like(ids_BT))  # type: ignore[operator,no-any-return]


class UnlikelihoodModule(TargetModule):
    """`TargetModule` with the second loss; `history` keeps the share of continued tokens that were penalised."""

    every, steps, looped = 4, 0, 0.0

    def losses(self, batch: Tensor) -> tuple[Tensor, dict[str, float]]:
        """Likelihood of a batch `[B, T + 1]` and, when due, unlikelihood of the loops that follow its prefixes."""
        loss, row = super().losses(batch)
        if self.steps % self.every == 0:
            with torch.compiler.set_stance("force_eager"):  # generation has too many shapes to compile
                text = continue_greedily(self.model, batch[:, :PREFIX], CONTINUED)
                logits = self.model(input_ids=text[:, :-1], logits_to_keep=CONTINUED).logits
            looped = third_time(text)[:, PREFIX:]
            p = logits.softmax(-1).gather(-1, text[:, PREFIX:, None])[..., 0]
            unlikelihood = -(torch.log1p(-(1 - 1e-4) * p) * looped).sum() / looped.sum().clamp(
                min=FULL * looped.numel()
            )
            loss = loss + unlikelihood
            self.looped = looped.float().mean().item()
        self.steps += 1
        return loss, row | {"looped": self.looped}


def main() -> None:
    """Command line entry; see the module docstring."""
    parser = arguments(str(__doc__).split("\n")[0], minutes=31, batch=16, lr=2.5e-3, seed=1)
    parser.add_argument(
        "--every", type=int, default=UnlikelihoodModule.every, help="steps from one unlikelihood to the next"
    )
    args = parser.parse_args()
    if args.init is None:
        parser.error("--init: give the target to teach")
    UnlikelihoodModule.every = args.every
    prepare(args)
    train(args, UnlikelihoodModule(load_target(args.init), args.minutes, args.lr))


if __name__ == "__main__":
    main()
