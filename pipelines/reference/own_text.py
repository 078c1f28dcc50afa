"""Greedy text of the reference target after prefixes of training windows, for a head to be trained on.

    python -m pipelines.reference.own_text --corpus runs/reference/corpus --target runs/reference/target \
        --out runs/reference/own.npy --minutes 6

A head drafts for what the target says, which is not what people write. Writes uint16 windows `[N, PREFIX + CONTINUED]`.
Decodes in bf16 with the runtime's kernels, `BATCH` windows at a time in each process.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import GenerationConfig

from ecospec_runtime.target import Target
from pipelines.reference.target import Windows

PREFIX, CONTINUED = 64, 193  # tokens of people and of the target
BATCH = 64


def write_texts(corpus: Path, folder: Path, until: float, rank: int, ranks: int, seed: int) -> NDArray[np.uint16]:
    """Every `ranks`-th batch of windows from `rank` on, continued until the time `until`."""
    torch.set_num_threads(1)
    target = Target.from_pretrained(folder)
    end = target.model.config.eos_token_id
    config = GenerationConfig(
        max_new_tokens=CONTINUED, do_sample=False, use_cache=True, suppress_tokens=[end], pad_token_id=end
    )
    windows = Windows(corpus / "train.npy", seed)
    texts = []
    for first in range(rank * BATCH, len(windows) - BATCH + 1, ranks * BATCH):
        prefixes = torch.stack([windows[i][:PREFIX] for i in range(first, first + BATCH)])
        with torch.inference_mode():
            text = target.model.generate(prefixes, generation_config=config, attention_mask=torch.ones_like(prefixes))
        texts.append(text.numpy().astype(np.uint16))
        if time.time() > until:
            break
    return np.concatenate(texts or [np.empty((0, PREFIX + CONTINUED), np.uint16)])


def main() -> None:
    """Command line entry; see the module docstring."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=6)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=2)
    args = parser.parse_args()
    until = time.time() + 60 * args.minutes
    jobs = [(args.corpus, args.target, until, rank, args.processes, args.seed) for rank in range(args.processes)]
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        texts = np.concatenate(pool.starmap(write_texts, jobs))
    np.save(args.out, texts)
    print(f"{args.out}: {len(texts)} windows, {len(texts) * CONTINUED} tokens of the target")


if __name__ == "__main__":
    main()
