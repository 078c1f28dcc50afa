"""Measure a reference target and its drafter on held-out text; write `manifest.json` and `report.md`.

    python -m pipelines.reference.report --corpus runs/reference/corpus --target runs/reference/target \
        --head runs/reference/head --out runs/reference

Everything is measured on the `bench` split, in float32 on one thread: perplexity beside a unigram and a 5-gram model of the
same training tokens, expert balance, loops of greedy text, and how often the head is right, by depth, along that text.

Legend of shapes: W windows, T tokens, L MoE layers, E experts, K top-k, D depths.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ecospec_runtime.checkpoint import weight_files
from ecospec_runtime.config import PoolConfig
from ecospec_runtime.drafters import load_drafter
from ecospec_runtime.drafters.base import Drafter
from ecospec_runtime.pool import Pool
from ecospec_runtime.statistics import loop_share
from ecospec_runtime.target import Target
from ecospec_runtime.weights import read_folder
from pipelines.reference.mtp import TARGET_RECORD
from pipelines.reference.ngram import KneserNey, perplexity, unigram
from pipelines.reference.target import CONTEXT, Windows

ORDER = 5
COVERAGE = (1, 2, 4, 8)
CHAIN = PoolConfig(depth=6, beam=1, width=max(COVERAGE))
POOL = PoolConfig()


def spread_windows(path: Path, count: int, length: int = CONTEXT + 1) -> NDArray[np.int64]:
    """`count` windows spread evenly over a token array: `[W, length]`."""
    ids = np.load(path, mmap_mode="r")
    starts = np.linspace(0, len(ids) - length, count).astype(np.int64)
    return np.stack([ids[s : s + length] for s in starts]).astype(np.int64)


def training_windows(path: Path, tokens: int, seed: int) -> NDArray[np.int64]:
    """The first windows of the training order, about `tokens` tokens in all: `[W, CONTEXT + 1]`."""
    data = Windows(path, seed)
    return np.stack([data[i].numpy() for i in range(min(len(data), max(1, tokens // CONTEXT)))])


def read_text(target: Target, windows_WT: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """The target's probability of every token from position ORDER - 1 on, and how often each expert was used `[L, E]`."""
    probabilities, load = [], np.zeros((target.moe_layers, target.experts), np.int64)
    for window in torch.from_numpy(windows_WT):
        positions = torch.arange(len(window) - 1)
        out = target.forward(window[:-1], positions, None, target.new_cache(), routing=True)
        assert out.logits is not None
        chosen = out.logits.log_softmax(-1).gather(1, window[1:, None])[:, 0]
        probabilities.append(chosen[ORDER - 2 :].double().exp().numpy())
        for layer, used in enumerate(out.routing_layers):
            load[layer] += np.bincount(used.flatten().numpy(), minlength=target.experts)
    return np.stack(probabilities), load


def balance(load_LE: NDArray[np.int64]) -> list[dict[str, float]]:
    """Per layer: largest over mean load, and the entropy of the load over its largest possible value."""
    rows = []
    for load in load_LE:
        share = load / load.sum()
        entropy = -(share[share > 0] * np.log(share[share > 0])).sum()
        rows.append(
            {
                "max_over_mean": round(float(share.max() * len(load)), 3),
                "entropy": round(float(entropy / np.log(len(load))), 4),
            }
        )
    return rows


def greedy(target: Target, prompts_WT: NDArray[np.int64], tokens: int) -> list[list[int]]:
    """Greedy continuations of equally long prompts, cut at the end of text."""
    prompts = torch.from_numpy(prompts_WT)
    out = target.model.generate(  # type: ignore[operator]
        prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=tokens
    )
    ends = set(target.eos_token_ids())
    texts = []
    for row in out[:, prompts.shape[1] :].tolist():
        end = next((i for i, token in enumerate(row) if token in ends), len(row))
        texts.append(row[:end])
    return texts


def looped(texts: list[list[int]]) -> float:
    """Share of all tokens that are in loops."""
    return round(sum(loop_share(t) * len(t) for t in texts) / max(1, sum(map(len, texts))), 4)


def accepted_depth(pool: Pool, future: list[int]) -> int:
    """How many nodes of the pool greedy verification would accept, all verified, when the target goes on with `future`."""
    at, depth = -1, 0
    for token in future:
        child = np.flatnonzero((pool.parents == at) & (pool.tokens == token))
        if not len(child):
            break
        at, depth = int(child[0]), depth + 1
    return depth


def head_quality(
    target: Target, drafter: Drafter, prompts: NDArray[np.int64], texts: list[list[int]]
) -> dict[str, Any]:
    """Acceptance of the head's own chain by depth, coverage by its best k, and tokens accepted from a whole pool.

    Depth d counts where the chain was right down to d - 1 and the greedy text is long enough.
    """
    tried, covered = np.zeros(CHAIN.depth, np.int64), np.zeros((CHAIN.depth, len(COVERAGE)), np.int64)
    lengths: list[int] = []
    for prompt, text in zip(prompts.tolist(), texts, strict=True):
        ids = torch.tensor(prompt + text)
        out = target.forward(
            ids, torch.arange(len(ids)), None, target.new_cache(), aux_layers=drafter.aux_layers, logits=False
        )
        assert out.aux is not None
        sequence = drafter.start()
        drafter.extend(sequence, ids[1:], out.aux[:-1])
        roots = list(range(len(prompt) - 1, len(ids) - 1 - CHAIN.depth))  # the root is text[r - len(prompt) + 1]
        for root, chain, pool in zip(
            roots, drafter.expand_many(sequence, roots, CHAIN), drafter.expand_many(sequence, roots, POOL), strict=True
        ):
            future = ids[root + 2 : root + 2 + CHAIN.depth].tolist()
            for depth, token in enumerate(future):
                offered = chain.tokens[depth * CHAIN.width : (depth + 1) * CHAIN.width].tolist()
                tried[depth] += 1
                covered[depth] += [token in offered[:k] for k in COVERAGE]
                if offered[0] != token:
                    break
            lengths.append(accepted_depth(pool, future))
    shares = covered / np.maximum(tried, 1)[:, None]
    return {
        "positions": len(lengths),
        "acceptance_by_depth": [round(float(x), 4) for x in shares[:, 0]],
        "coverage_by_depth": {f"top_{k}": [round(float(x), 4) for x in shares[:, i]] for i, k in enumerate(COVERAGE)},
        "pool": POOL.model_dump(),
        "accepted_from_pool": round(float(np.mean(lengths)), 3) if lengths else 0.0,
    }


def drafter_weights(folder: Path, kind: str, layers: int) -> tuple[int, int]:
    """Parameters and bytes of a head, or of the layer in a target's checkpoint that drafts."""
    own = [
        tensor
        for name, tensor in read_folder(weight_files(folder)).items()
        if (name.startswith(f"model.layers.{layers}.") if kind == "mtp" else name not in ("d2t", "t2d"))
    ]
    return sum(tensor.nbytes // tensor.dtype.itemsize for tensor in own), sum(tensor.nbytes for tensor in own)


def weights_summary(folder: Path, parameters: int, record: str = "training.json") -> dict[str, Any]:
    """Parameters, bytes on disk and what the training run wrote about itself."""
    files = sorted(folder.glob("*.safetensors"))
    path = folder / record
    training = json.loads(path.read_text()) if path.exists() else {}
    return {
        "parameters": parameters, "bytes": sum(f.stat().st_size for f in files), "training_tokens": training.get("tokens"),
        "recipes": training.get("recipes", []),
    }  # fmt: skip


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run every measurement; returns the manifest."""
    corpus = json.loads((args.corpus / "manifest.json").read_text())
    target = Target.from_pretrained(args.target, dtype="float32")
    drafter = load_drafter(args.head, target)
    record = TARGET_RECORD if (args.target / TARGET_RECORD).exists() else "training.json"
    about_target = weights_summary(args.target, sum(p.numel() for p in target.model.parameters()), record)
    tokens = args.tokens or about_target["training_tokens"]
    held_out = spread_windows(args.corpus / "bench.npy", args.windows)
    probabilities, load = read_text(target, held_out)
    train = training_windows(args.corpus / "train.npy", tokens, args.seed)
    ngram = KneserNey(train, target.vocab_size, ORDER).probabilities(held_out)
    frequent = unigram(train, target.vocab_size)[held_out[:, ORDER - 1 :]]
    prompts = spread_windows(args.corpus / "bench.npy", args.prompts + 2, 128)[1:-1]
    texts = greedy(target, prompts, 128)
    parameters, size = drafter_weights(args.head, drafter.kind, target.layers)
    return {
        "corpus": {"sha256": corpus["train"]["sha256"], "bench_sha256": corpus["bench"]["sha256"], "train_tokens": corpus["train"]["tokens"]},
        "seed": args.seed,
        "target": about_target | {
            "fingerprint": target.fingerprint,
            "held_out_tokens": int(probabilities.size),
            "perplexity": {
                "target": round(perplexity(probabilities), 3),
                f"{ORDER}-gram": round(perplexity(ngram), 3),
                "unigram": round(perplexity(frequent), 3),
                "ngram_training_tokens": int(train.size),
            },
            "greedy": {
                "prompts": len(texts), "tokens": sum(map(len, texts)),
                "loop_share": looped(texts), "loop_share_of_48": looped([t[:48] for t in texts]),
                "loop_share_of_natural_text": looped(held_out[:, :128].tolist()),
            },
            "experts": balance(load),
        },
        "head": weights_summary(args.head, parameters)
        | {"kind": drafter.kind, "bytes": size, "fingerprint": drafter.fingerprint, "aux_layers": drafter.aux_layers}
        | head_quality(target, drafter, prompts, texts),
    }  # fmt: skip


def table(manifest: dict[str, Any]) -> str:
    """The manifest as Markdown for people."""
    target, head = manifest["target"], manifest["head"]
    p, g = target["perplexity"], target["greedy"]
    worst = max(target["experts"], key=lambda row: row["max_over_mean"])
    lines = [
        "# Reference target and drafter", "",
        "Measured on packages held out from training, by `python -m pipelines.reference.report`.", "",
        "| target | |", "|---|---|",
        f"| parameters, bytes | {target['parameters'] / 1e6:.1f} M, {target['bytes'] / 1e6:.1f} MB |",
        f"| training tokens | {target['training_tokens']} |",
        f"| perplexity on {target['held_out_tokens']} held-out tokens | **{p['target']}** |",
        f"| {ORDER}-gram, unigram on the same tokens | {p[f'{ORDER}-gram']}, {p['unigram']} |",
        f"| tokens inside loops: {g['prompts']} greedy texts of up to 128 tokens | {100 * g['loop_share']:.1f} % |",
        f"| their first 48 tokens, as the quickstart's bench decodes | {100 * g['loop_share_of_48']:.1f} % |",
        f"| people's own code, by the same count | {100 * g['loop_share_of_natural_text']:.1f} % |",
        f"| expert load: worst layer's largest over mean | {worst['max_over_mean']} |", "",
        "| layer | largest / mean load | entropy of load (1 is even) |", "|---|---|---|",
        *(f"| {i} | {row['max_over_mean']} | {row['entropy']} |" for i, row in enumerate(target["experts"])), "",
        f"Drafter ({head.get('kind', 'eagle3')}): {head['parameters'] / 1e6:.2f} M parameters, {head['bytes'] / 1e6:.1f} MB, {head['training_tokens']} tokens.",
        f"Along {head['positions']} positions of greedy text; depth d counts where its own chain was right down to d - 1.",
        "",
        "| depth | accepted | " + " | ".join(f"in its best {k}" for k in COVERAGE[1:]) + " |",
        "|---|---|" + "---|" * (len(COVERAGE) - 1),
        *(
            f"| {d + 1} | {accepted} | " + " | ".join(str(head["coverage_by_depth"][f"top_{k}"][d]) for k in COVERAGE[1:]) + " |"
            for d, accepted in enumerate(head["acceptance_by_depth"])
        ), "",
        f"Tokens accepted from a whole pool ({head['pool']['depth']} levels of {head['pool']['width']},",
        f"{head['pool']['beam']} expanded): {head['accepted_from_pool']} beside the one the target adds.", "",
    ]  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    """Command line entry; see the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--head", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--tokens", type=int, help="training tokens for the n-gram models; default: what the target saw"
    )
    parser.add_argument("--windows", type=int, default=48, help="held-out windows of 512 tokens")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0, help="seed of the target's training order")
    args = parser.parse_args()
    torch.set_num_threads(1)
    manifest = measure(args)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    (args.out / "report.md").write_text(table(manifest))
    print(table(manifest))


if __name__ == "__main__":
    main()
