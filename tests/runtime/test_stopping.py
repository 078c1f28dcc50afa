"""Ids, text and log-probabilities end together: at the limit, at the end token, before a stop string."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ecospec_runtime.stopping import TextStream, Token


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte; merges none, so characters above ASCII span several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(["<end>", "ab", *alphabet])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


TOKENIZER = byte_tokenizer()


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def drain(
    ids: list[int], limit: int = 1000, stops: tuple[str, ...] = (), eos: tuple[int, ...] = (0,)
) -> tuple[list[Token], Any]:
    stream = TextStream(TOKENIZER, ids_of("prompt"), limit, eos, stops)
    tokens: list[Token] = []
    for i, token in enumerate(ids):
        if stream.reason:
            break
        tokens += stream.push(token, float(i))
    return tokens, stream.reason


def text_of(tokens: list[Token]) -> str:
    return "".join(token.text for token in tokens)


def test_characters_arrive_whole() -> None:
    text = "héllo 日本 😀!"
    tokens, _ = drain(ids_of(text))
    assert text_of(tokens) == text
    assert not any("\ufffd" in token.text for token in tokens)
    assert [token.id for token in tokens] == ids_of(text)
    cut, reason = drain(ids_of("é日"), limit=4)  # ends inside the second character
    assert (text_of(cut), len(cut), reason) == ("é", 4, "length")


def test_exactly_the_limit() -> None:
    for limit in (1, 2, 5):
        tokens, reason = drain(ids_of("abcde"), limit=limit)
        assert (len(tokens), reason) == (limit, "length")


def test_end_token_is_the_last_and_has_no_text() -> None:
    tokens, reason = drain([*ids_of("ab"), 0, *ids_of("cd")])
    assert (text_of(tokens), reason) == ("ab", "eos")
    assert [token.id for token in tokens] == [*ids_of("ab"), 0]
    tokens, reason = drain([*ids_of("ab"), 0, *ids_of("c")], eos=())
    assert len(tokens) == 4
    assert reason is None


@pytest.mark.parametrize("stop", ["\n\n", "cd", "c", "abcd", "d😀"])
def test_text_ends_before_a_stop_string(stop: str) -> None:
    whole = "xab\nabcd😀 ef\n\nrest"
    tokens, reason = drain(ids_of(whole), stops=("never", stop))
    assert reason == "stop"
    assert text_of(tokens) == whole[: whole.index(stop)]
    assert [token.id for token in tokens] == ids_of(whole[: whole.index(stop)])
    assert [token.logprob for token in tokens] == [float(i) for i in range(len(tokens))]


def test_stop_string_inside_one_token_and_earliest_of_several() -> None:
    tokens, reason = drain([*ids_of("x"), 1, *ids_of("y")], stops=("b",))  # token 1 is "ab"
    assert (text_of(tokens), [t.id for t in tokens], reason) == ("xa", [*ids_of("x"), 1], "stop")
    tokens, _ = drain([*ids_of("x"), 1, *ids_of("y")], stops=("b", "ab"))
    assert (text_of(tokens), len(tokens)) == ("x", 1)


def test_nothing_that_may_become_a_stop_string_is_shown_early() -> None:
    stream = TextStream(TOKENIZER, [], 100, (), ("STOP",))
    shown = [text_of(stream.push(token)) for token in ids_of("aSTSTOx")]
    assert shown == ["a", "", "", "ST", "", "", "STOx"]
    tokens, reason = drain([*ids_of("aST"), 0], stops=("STOP",))
    assert (text_of(tokens), reason) == ("aST", "eos")
    tokens, reason = drain(ids_of("aST"), limit=3, stops=("STOP",))
    assert (text_of(tokens), reason) == ("aST", "length")
