"""Train a drafter for a reference target that knows another kind of text: one that no bundle was tuned for.

    taskset -c 1 python -m pipelines.reference.foreign --target pipelines/reference/model/target \
        --drafter pipelines/reference/model/drafter --out runs/foreign/qwen3-moe

The targets write Python; this drafter reads the prose and web files inside the installed packages, from scratch, with the
target's tokenizer, in one process. It is of the kind that the target's own drafter is: an EAGLE-3 head, or a
multi-token-prediction layer, which comes with a copy of the target's checkpoint. `OUT` is a drafter folder; `OUT/foreign.json`
says how often it and the target's own drafter are right on held-out Python, `OUT/corpus` holds the tokens.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from ecospec_runtime.drafters import load_drafter
from ecospec_runtime.target import Target
from pipelines.reference.corpus import collect, encode, readable
from pipelines.reference.report import greedy, head_quality, spread_windows

SUFFIXES = (".md", ".rst", ".txt", ".html", ".css", ".js")
NAMES = ("METADATA", "LICENSE", "NOTICE")
SHORT = ("--batch", "1", "--steps", "2", "--share", "0.25")  # learns most in a few minutes
LENGTH = 128  # tokens of a prompt, and of the greedy text after it, as in `report.py`


def foreign_files(site: Path, seed: int = 0) -> list[str]:
    """The distinct readable files below a folder that are not programs but prose or web pages, shuffled."""
    found = {}
    for path in sorted(site.rglob("*")):
        if (path.suffix in SUFFIXES or path.name in NAMES) and path.is_file():
            text = path.read_text(encoding="utf-8", errors="ignore")
            if readable(text):
                found[hashlib.sha256(text.encode()).digest()] = text
    files = list(found.values())
    random.Random(seed).shuffle(files)
    return files


def write_corpus(target: Path, out: Path) -> dict[str, int]:
    """Write `train.npy` (foreign text) and `bench.npy` (held-out Python) under `out`; returns the tokens of each."""
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    out.mkdir(parents=True, exist_ok=True)
    tokens = {}
    for name, files in (("train", foreign_files(Path(sysconfig.get_paths()["purelib"]))), ("bench", collect("bench"))):
        ids = encode(tokenizer, files)
        np.save(out / f"{name}.npy", ids)
        tokens[name] = len(ids)
    return tokens


def training(args: argparse.Namespace, kind: str) -> list[str]:
    """Module and arguments of the training run."""
    module = ["pipelines.reference.mtp"] if kind == "mtp" else ["pipelines.reference.head", "--shared-embedding"]
    return [*module, "--corpus", str(args.out / "corpus"), "--target", str(args.target), "--out", str(args.out),
            "--minutes", str(args.minutes), "--processes", "1", "--seed", str(args.seed), *SHORT]  # fmt: skip


def compare(target: Target, drafters: dict[str, Path], bench: Path, prompts: int) -> dict[str, Any]:
    """What `head_quality` says of each drafter along the target's greedy text after windows of a token array."""
    windows = spread_windows(bench, prompts + 2, LENGTH)[1:-1]
    texts = greedy(target, windows, LENGTH)
    return {
        name: head_quality(target, load_drafter(folder, target), windows, texts) for name, folder in drafters.items()
    }


def main() -> None:
    """Command line entry; see the module docstring."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--target", type=Path, required=True, help="the reference target, not widened")
    parser.add_argument("--drafter", type=Path, required=True, help="its own drafter, to compare with")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--prompts", type=int, default=8, help="windows of held-out Python to compare on")
    parser.add_argument("--seed", type=int, default=3)
    args = parser.parse_args()
    if not (args.target / "tokenizer.json").is_file():
        parser.error(f"--target {args.target}: no tokenizer.json there; give the folder of a reference target")
    torch.set_num_threads(1)
    target = Target.from_pretrained(args.target, dtype="float32")
    tokens = write_corpus(args.target, args.out / "corpus")
    kind = load_drafter(args.drafter, target).kind
    subprocess.run([sys.executable, "-m", *training(args, kind)], check=True)
    found = compare(target, {"own": args.drafter, "foreign": args.out}, args.out / "corpus" / "bench.npy", args.prompts)
    (args.out / "foreign.json").write_text(json.dumps({"kind": kind, "tokens": tokens, **found}, indent=2) + "\n")
    for name, quality in found.items():
        print(f"{name}: accepted by depth {quality['acceptance_by_depth']} on {quality['positions']} positions")


if __name__ == "__main__":
    main()
