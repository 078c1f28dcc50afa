"""The prompt reader: every row format, and every mistake as one clear line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ecospec_runtime.errors import UserError
from ecospec_runtime.prompts import fingerprint_prompts, read_prompts


class ChatTokenizer:
    """Stands for a tokenizer with a chat template."""

    chat_template = "{{ a template }}"

    def apply_chat_template(self, messages: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool) -> str:
        assert (tokenize, add_generation_prompt) == (False, True)
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": ([0] if add_special_tokens else []) + [ord(c) for c in text]}


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


CHAT = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
SHAREGPT = [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "q"}, {"type": "image"}]}]


@pytest.mark.parametrize(
    ("row", "plain", "chat"),
    [
        ({"prompt": "q"}, "q", "q"),
        ({"text": "q", "id": 3}, "q", "q"),
        ({"messages": CHAT}, "s\nq", "<system>s<user>q<assistant>"),
        ({"conversations": SHAREGPT}, "s\nq", "<system>s<user>q<assistant>"),
        ({"messages": PARTS}, "q", "<user>q<assistant>"),
        ({"question_id": 1, "turns": ["q", "later"]}, "q", "<user>q<assistant>"),
        ({"prompt": None, "text": "q"}, "q", "q"),
    ],
)
def test_row_formats(tmp_path: Path, row: dict[str, Any], plain: str, chat: str) -> None:
    path = write(tmp_path / "p.jsonl", [row])
    assert [p.text for p in read_prompts(path)] == [plain]
    assert [p.text for p in read_prompts(path, ChatTokenizer())] == [chat]


def test_special_tokens_are_added_once_and_the_end_is_kept(tmp_path: Path) -> None:
    plain, chat = read_prompts(write(tmp_path / "p.jsonl", [{"text": "ab"}, {"messages": CHAT}]), ChatTokenizer())
    assert plain.encode(ChatTokenizer()) == [0, 97, 98]
    assert chat.encode(ChatTokenizer())[0] == ord("<")
    assert plain.encode(ChatTokenizer(), limit=2) == [97, 98]


def test_blank_lines_and_empty_text_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('\n{"text": "a"}\n\n{"text": "  "}\n{"text": "b"}')
    assert [p.text for p in read_prompts(path)] == ["a", "b"]
    assert [p.text for p in read_prompts(path, limit=1)] == ["a"]


def test_parquet_folder_and_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    pq.write_table(pa.table({"text": ["a", ""]}), tmp_path / "set" / "0.parquet")
    pq.write_table(pa.table({"text": ["b"]}), tmp_path / "set" / "1.parquet")
    from_parquet = read_prompts(tmp_path / "set")
    from_lines = read_prompts(write(tmp_path / "p.jsonl", [{"prompt": "a"}, {"text": "b"}]))
    assert [p.text for p in from_parquet] == ["a", "b"]
    assert fingerprint_prompts(from_parquet) == fingerprint_prompts(from_lines)
    assert fingerprint_prompts(from_lines) != fingerprint_prompts(from_lines[::-1])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "a"}\n{"text": \n', "line 2: not valid JSON"),
        (b'{"text": "a"}\n[1]\n', "line 2: expected an object"),
        (b'{"text": "a"}\n\n{"body": "b"}\n', "line 3: no field among prompt.*found body"),
        (b'{"text": 3}\n', "line 1: field 'text' is neither"),
        (b'{"messages": [{"text": "x"}]}\n', "line 1: a message of 'messages' lacks role"),
        (b'{"text": "\xff"}\n', "line 1: not valid UTF-8"),
        (b"", "no usable prompt"),
        (b'{"text": ""}\n', "no usable prompt"),
    ],
)
def test_mistakes_name_file_and_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        read_prompts(path, limit=1)
    assert "prompts.jsonl" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.parquet").write_bytes(b"not parquet")
    for nowhere in (tmp_path / "nothing.jsonl", "nothing", "a/b/c", "./b", "~/b"):
        with pytest.raises(UserError, match="no such prompt file"):
            read_prompts(nowhere)
    with pytest.raises(UserError, match="no Parquet file"):
        read_prompts(tmp_path / "empty")
    with pytest.raises(UserError, match="cannot be read as Parquet"):
        read_prompts(tmp_path / "bad.parquet")
    monkeypatch.setattr(
        "datasets.get_dataset_split_names", lambda name: (_ for _ in ()).throw(ConnectionError("offline"))
    )
    with pytest.raises(UserError, match=r"neither a local file nor a hub data set that loads \(offline"):
        read_prompts("owner/name")


def test_hub_data_set_reads_the_first_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.get_dataset_split_names", lambda name: ["test"])
    monkeypatch.setattr("datasets.load_dataset", lambda name, split, streaming: [{"turns": [f"{name} {split}"]}])
    assert [p.text for p in read_prompts("owner/name")] == ["owner/name test"]
    assert [p.text for p in read_prompts("owner/name:dev")] == ["owner/name dev"]
