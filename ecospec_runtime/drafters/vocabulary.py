"""Whether a drafter speaks the target's tokens. A disagreement never changes the text, it costs acceptance."""

from __future__ import annotations

from typing import Any

from ecospec_runtime.errors import UserError

RENAMED = 0.01  # share of ids that may name another token in two releases of one tokenizer


def check_vocabulary(own: dict[str, int], target: Any, where: str) -> None:
    """Raise UserError if more than a few ids that both vocabularies have name different tokens, or one is much larger.

    `own` maps tokens to ids. Ids that only one of them names (added tokens, padding of an embedding) are few in one tokenizer.
    """
    theirs = {index: token for token, index in target.tokenizer.get_vocab().items()}
    ours = {index: token for token, index in own.items()}
    wrong = sorted(index for index in ours.keys() & theirs.keys() if ours[index] != theirs[index])
    alone = len(ours.keys() ^ theirs.keys())
    if max(len(wrong), alone) > RENAMED * len(theirs):
        example = f", first {wrong[0]} ({ours[wrong[0]]!r} here, {theirs[wrong[0]]!r} there)" if wrong else ""
        raise UserError(
            f"{where}: made for another tokenizer: it has {len(ours)} tokens, the target's {len(theirs)}, and {len(wrong)} ids "
            f"name other tokens{example}; use a drafter for this target's tokenizer"
        )
