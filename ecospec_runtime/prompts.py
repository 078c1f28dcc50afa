"""Prompts for harvest and for the runtime's `--prompts`: JSONL files, Parquet folders, hub data sets.

A row may be `{"prompt": text}`, `{"text": text}`, `{"messages": [{"role", "content"}]}`, `{"conversations": [...]}` (the same, or
ShareGPT's `from` / `value`) or Spec-Bench's `{"turns": [...]}` (the first turn). Chats end at their last user message and go
through the tokenizer's chat template if it has one; without one their contents are joined by line ends.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ecospec_runtime.config import is_hub_id
from ecospec_runtime.errors import UserError

FIELDS = ("prompt", "text", "messages", "conversations", "turns")
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


@dataclass(frozen=True)
class Prompt:
    """One prompt as text. `templated`: a chat template wrote its special tokens already."""

    text: str
    templated: bool = False

    def encode(self, tokenizer: Any, limit: int | None = None) -> list[int]:
        """Token ids; with a `limit`, the last `limit` of them. UserError for text that is not Unicode."""
        try:
            self.text.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"the prompt is not valid text at character {error.start + 1} (half of a UTF-16 pair, or a byte that is not "
                "UTF-8); remove it"
            ) from None
        ids: list[int] = tokenizer(self.text, add_special_tokens=not self.templated)["input_ids"]
        return ids if limit is None else ids[-limit:]


def read_prompts(source: str | Path, tokenizer: Any = None, limit: int | None = None) -> list[Prompt]:
    """Read the prompts of a JSONL file, a folder or file of Parquet, or a hub data set (`owner/name` or `owner/name:split`).

    Rows with empty text are skipped. `limit` stops after that many prompts; a JSONL file is checked to its end all the same.
    Raises UserError: no such source, a malformed line (named with its number), an unknown row format, no usable row.
    """
    path = Path(source)
    if path.is_file() and path.suffix != ".parquet":
        rows: Iterable[tuple[str, Any]] = list(_json_lines(path))
    elif path.exists():
        rows = _parquet_rows(path)
    elif not path.suffix and is_hub_id(str(source)):
        rows = _hub_rows(str(source))
    else:
        raise UserError(
            f"{source}: no such prompt file; give a JSONL file, a folder of Parquet files or a hub data set (owner/name)"
        )
    prompts: list[Prompt] = []
    for where, row in rows:
        prompt = _to_prompt(where, row, tokenizer)
        if prompt.text.strip() and (limit is None or len(prompts) < limit):
            prompts.append(prompt)
        if limit is not None and len(prompts) >= limit and not isinstance(rows, list):
            break
    if not prompts:
        raise UserError(
            f"{source}: no usable prompt; each row needs one of the fields {', '.join(FIELDS)} with text in it"
        )
    return prompts


def fingerprint_prompts(prompts: list[Prompt]) -> str:
    """sha256 over the prompts' text, in order; independent of the file format they came from."""
    digest = hashlib.sha256()
    for prompt in prompts:
        data = prompt.text.encode()
        digest.update(f"{len(data)}:{int(prompt.templated)}:".encode() + data)
    return digest.hexdigest()


def _json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    number = 0
    try:
        with path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield f"{path}, line {number}", json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(
            f"{path}, line {number}: not valid JSON ({error.msg}); write one JSON object per line"
        ) from None
    except UnicodeDecodeError:
        raise UserError(f"{path}, line {number + 1}: not valid UTF-8; save the file as UTF-8") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    datasets = _import_datasets(str(path))
    files = sorted(str(file) for file in path.rglob("*.parquet")) if path.is_dir() else [str(path)]
    if not files:
        raise UserError(f"{path}: no Parquet file in this folder; give a JSONL file or a folder of Parquet files")
    try:
        for number, row in enumerate(
            datasets.load_dataset("parquet", data_files=files, split="train", streaming=True), 1
        ):
            yield f"{path}, row {number}", row
    except Exception as error:  # pyarrow and datasets raise many kinds for an unreadable file
        raise UserError(f"{path}: cannot be read as Parquet ({_one_line(error)})") from None


def _hub_rows(source: str) -> Iterator[tuple[str, Any]]:
    datasets = _import_datasets(source)
    name, _, split = source.partition(":")
    try:
        if not split:
            names = datasets.get_dataset_split_names(name)
            split = "train" if "train" in names else names[0]
        for number, row in enumerate(datasets.load_dataset(name, split=split, streaming=True), 1):
            yield f"{name}, split {split}, row {number}", row
    except Exception as error:  # network, authentication, unknown id, unknown split: all the user's to fix
        raise UserError(f"{source}: neither a local file nor a hub data set that loads ({_one_line(error)})") from None


def _import_datasets(source: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise UserError(f"{source}: not a JSONL file, and other sources need `pip install 'ecospec[train]'`") from None
    return datasets


def _to_prompt(where: str, row: Any, tokenizer: Any) -> Prompt:
    if not isinstance(row, Mapping):
        raise UserError(f"{where}: expected an object with one of the fields {', '.join(FIELDS)}")
    field = next((name for name in FIELDS if row.get(name) is not None), None)
    if field is None:
        raise UserError(f"{where}: no field among {', '.join(FIELDS)}; found {', '.join(map(str, row)) or 'none'}")
    value = row[field]
    if isinstance(value, str):
        return Prompt(value)
    if isinstance(value, list) and field in ("turns", "prompt") and all(isinstance(turn, str) for turn in value):
        return _from_chat([{"role": "user", "content": turn} for turn in value[:1]], tokenizer)
    if isinstance(value, list) and all(isinstance(message, Mapping) for message in value):
        return _from_chat([_to_message(where, field, message) for message in value], tokenizer)
    raise UserError(f"{where}: field '{field}' is neither text nor a list of messages")


def _to_message(where: str, field: str, message: Mapping[str, Any]) -> dict[str, str]:
    role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
    if isinstance(content, list):  # multi-part contents: the text parts count
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    if not isinstance(role, str) or not isinstance(content, str):
        raise UserError(
            f"{where}: a message of '{field}' lacks role and content; write {{'role': 'user', 'content': ...}}"
        )
    return {"role": _ROLES.get(role, role), "content": content}


def _from_chat(messages: list[dict[str, str]], tokenizer: Any) -> Prompt:
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not any(message["content"].strip() for message in messages):
        return Prompt("")
    if getattr(tokenizer, "chat_template", None):
        return Prompt(
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True), templated=True
        )
    return Prompt("\n".join(message["content"] for message in messages))


def _one_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
