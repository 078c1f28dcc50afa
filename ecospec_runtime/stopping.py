"""Where the text ends, and how ids become text on the way: nothing leaves here that a stop rule later takes back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from tokenizers.decoders import DecodeStream

from ecospec_runtime.errors import UserError

Reason = Literal["length", "eos", "stop"]
_CONTEXT = 8  # prompt ids that a decoder sees first, so that a leading space survives


@dataclass(frozen=True)
class Token:
    """One emitted token. `text` is what it adds: empty for the end token and in the middle of a character."""

    id: int
    text: str
    logprob: float | None = None


class TextStream:
    """Turns chosen ids into emitted tokens and knows when to end.

    Exactly `limit` tokens at most. The end-of-sequence id is emitted, with no text, and is the last. A stop string is
    not part of the text: the token in which it begins is cut there (or left out if nothing of it remains) and nothing
    follows. Tokens whose text may be the beginning of a stop string are held back until that is decided.
    """

    def __init__(
        self, tokenizer: Any, prompt: list[int], limit: int, eos: tuple[int, ...] = (), stops: tuple[str, ...] = ()
    ):
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise UserError(
                f"tokenizer {type(tokenizer).__name__} has no tokenizer.json form; convert it to a fast one"
            )
        self._backend = backend
        self._decoder = DecodeStream(prompt[-_CONTEXT:], skip_special_tokens=True)
        self._limit, self._eos, self._stops = limit, frozenset(eos), stops
        self._held: list[Token] = []
        self.reason: Reason | None = None

    @property
    def room(self) -> int:
        """How many more tokens may still be chosen."""
        return 0 if self.reason else self._limit

    def push(self, token: int, logprob: float | None = None) -> list[Token]:
        """Add the next chosen id; returns the tokens that are now certain. Once `reason` is set, push no more."""
        self._limit -= 1
        if token in self._eos:
            self.reason = "eos"
            return [*self._release(), Token(token, "", logprob)]
        text = self._decoder.step(self._backend, token) or ""
        self._held.append(Token(token, text, logprob))
        if self._stops:
            ready = self._until_stop()
            if self.reason:
                return ready
        else:
            ready = self._release()
        if self._limit == 0:
            self.reason = "length"
            ready += self._release()
        return ready

    def _release(self) -> list[Token]:
        ready, self._held = self._held, []
        return ready

    def _until_stop(self) -> list[Token]:
        """Cut at the earliest stop string in the held text, or release what no stop string can reach any more."""
        text = "".join(token.text for token in self._held)
        found = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.reason = "stop"
            return self._cut(min(found))
        reach = max(_overlap(text, stop) for stop in self._stops)
        ready, used = [], 0
        while self._held and used + len(self._held[0].text) <= len(text) - reach:
            used += len(self._held[0].text)
            ready.append(self._held.pop(0))
        return ready

    def _cut(self, length: int) -> list[Token]:
        """The held tokens up to `length` characters, the last one shortened."""
        ready = []
        for token in self._release():
            if length <= 0:
                break
            ready.append(Token(token.id, token.text[:length], token.logprob))
            length -= len(token.text)
        return ready


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that begins `stop`, shorter than `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0
