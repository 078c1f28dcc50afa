"""Text that every installation has: the Python sources of the installed packages, split by whole package.

    python -m pipelines.reference.corpus --out runs/reference/corpus            tokenizer, token arrays, manifest
    python -m pipelines.reference.corpus --prompts harvest --count 400 --out F  prompts of one held-out split as JSONL

Three disjoint splits: `train` (target and drafter), `harvest` (traces for the predictor and the tuner) and `bench`
(what is reported). A new held-out package goes into `HELD_OUT`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
VOCABULARY = 4096
HELD_OUT = {
    "harvest": ("networkx", "aiohttp", "werkzeug", "alembic", "gunicorn", "rich", "skops", "PIL", "huey", "pyparsing"),
    "bench": ("optuna", "jinja2", "click", "typer", "docker", "fsspec", "joblib", "git", "urllib3", "httpx2"),
}
# Packages that repeat another one or hold mostly generated tables and clients.
SKIPPED = (
    "numba",
    "llvmlite",
    "pip",
    "databricks",
    "pytorch_lightning",
    "wcwidth",
    "mypyc",
    "google",
    "opentelemetry",
    "pyasn1_modules",
)
BYTES_PER_PACKAGE = 9_000_000
_COPYRIGHT = re.compile(r"\A(?:\s*#[^\n]*\n)+")


def readable(text: str) -> bool:
    """Whether a source file reads like written code, not a generated table: moderate size, short lines, few digits."""
    if not 600 <= len(text) <= 120_000:
        return False
    longest = max(len(line) for line in text.splitlines())
    return longest <= 240 and sum(c.isdigit() for c in text) <= 0.06 * len(text)


def package_files(site: Path, package: str) -> Iterator[str]:
    """Yield the readable sources of one package in a fixed order, leading comment block removed."""
    for path in sorted((site / package).rglob("*.py")):
        text = _COPYRIGHT.sub("", path.read_text(encoding="utf-8", errors="ignore")).lstrip("\n")
        if readable(text):
            yield text


def split_of(package: str) -> str:
    """Name of the split a package belongs to."""
    return next((name for name, packages in HELD_OUT.items() if package in packages), "train")


def collect(split: str, seed: int = 0) -> list[str]:
    """All distinct files of a split, shuffled; at most `BYTES_PER_PACKAGE` from one package."""
    site = Path(sysconfig.get_paths()["purelib"])
    packages = sorted(p.name for p in site.iterdir() if p.is_dir() and not p.name.startswith((".", "__")))
    seen: set[bytes] = set()
    files: list[str] = []
    for package in packages:
        if package in SKIPPED or package.endswith(("-info", ".libs", "__pycache__")) or split_of(package) != split:
            continue
        taken = 0
        found = list(package_files(site, package))
        random.Random(f"{seed}/{package}").shuffle(found)
        for text in found:
            digest = hashlib.sha256(text.encode()).digest()
            if digest not in seen and taken < BYTES_PER_PACKAGE:
                seen.add(digest)
                taken += len(text)
                files.append(text)
    random.Random(seed).shuffle(files)
    return files


def fingerprint(files: list[str]) -> str:
    """sha256 over the files in order."""
    digest = hashlib.sha256()
    for text in files:
        digest.update(text.encode())
        digest.update(b"\0")
    return digest.hexdigest()


def train_tokenizer(files: list[str], vocabulary: int = VOCABULARY) -> Tokenizer:
    """Byte-level BPE; `END_OF_TEXT` has id 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(files, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, files: list[str]) -> np.ndarray:
    """Concatenate the files' ids, each followed by `END_OF_TEXT`: uint16 `[tokens]`."""
    ids: list[int] = []
    for encoding in tokenizer.encode_batch(files):
        ids.extend(encoding.ids)
        ids.append(0)
    return np.array(ids, dtype=np.uint16)


def build(out: Path) -> dict[str, object]:
    """Write `tokenizer.json`, `<split>.npy` and `manifest.json` under `out`; returns the manifest."""
    out.mkdir(parents=True, exist_ok=True)
    splits = {name: collect(name) for name in ("train", *HELD_OUT)}
    tokenizer = train_tokenizer(splits["train"][:4000])
    tokenizer.save(str(out / "tokenizer.json"))
    manifest: dict[str, object] = {"vocabulary": VOCABULARY, "held_out": HELD_OUT}
    for name, files in splits.items():
        ids = encode(tokenizer, files)
        np.save(out / f"{name}.npy", ids)
        characters = sum(len(f) for f in files)
        manifest[name] = {
            "files": len(files), "characters": characters, "tokens": len(ids), "sha256": fingerprint(files),
        }  # fmt: skip
    (out / "manifest.json").write_text(json.dumps(manifest, indent=2))
    return manifest


def prompts(split: str, count: int, seed: int = 0) -> list[dict[str, str]]:
    """`count` prompts of natural code: the text of a file up to the end of a line after 200-600 characters in its body.

    Without the newline: the tokenizer joins it to the next line's indentation, and one on its own says that the text ends.
    """
    rng = random.Random(f"{split}/{seed}")
    rows = []
    for text in collect(split, seed):
        lines = text.splitlines(keepends=True)
        start = rng.randrange(max(1, len(lines) // 2))
        chunk = ""
        length = rng.randrange(200, 600)
        for line in lines[start:]:
            chunk += line
            if len(chunk) >= length:
                break
        chunk = chunk.strip("\n")
        if len(chunk) >= 200:
            rows.append({"prompt": chunk})
        if len(rows) == count:
            break
    return rows


def main() -> None:
    """Command line entry; see the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", choices=sorted(HELD_OUT), help="write prompts of this split instead of the corpus")
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.prompts:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        rows = prompts(args.prompts, args.count, args.seed)
        args.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{len(rows)} prompts -> {args.out}")
    else:
        print(json.dumps(build(args.out), indent=2))


if __name__ == "__main__":
    main()
