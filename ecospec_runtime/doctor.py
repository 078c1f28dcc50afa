"""Checks whether an installation can be trusted: versions, bundle, greedy text with and without speculation, draft head."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from ecospec_runtime.bundle import load_bundle
from ecospec_runtime.config import GenerationConfig
from ecospec_runtime.drafters.eagle3_layouts import IDS
from ecospec_runtime.engine import Engine
from ecospec_runtime.layer_check import DEPTH, FEWEST, better_neighbour, measure
from ecospec_runtime.machine import describe, versions
from ecospec_runtime.placement import Placement
from ecospec_runtime.statistics import divergence, first_divergence, transformers_greedy
from ecospec_runtime.target import Target

Status = Literal["ok", "warn", "FAIL"]
OLDEST = {"torch": (2, 11), "transformers": (5, 17), "triton": (3, 6)}
PROMPTS = (
    "def fibonacci(n):\n",
    "import json\nfrom pathlib import Path\n\n\ndef load(path: Path) -> dict:\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "The three most important facts about the ocean are",
    "Q: What is the capital of France?\nA:",
    "1, 2, 3, 4, 5,",
    "for i in range(10):\n    if i % 2 == 0:\n",
    "Dear Sir or Madam,\n\nI am writing to",
)
MOST_PROMPTS = 64  # of a file
NEAR_TIE = 0.25  # logits: a bfloat16 argmax may flip below this gap without anything being wrong
POLICY = "confidence:budget=8,acceptance=raw"
LITTLE = 0.1  # share of right first tokens below which a draft head is no use


@dataclass(frozen=True)
class Finding:
    """Outcome of one check."""

    status: Status
    check: str
    message: str


def examine(
    bundle: Path | None, target: str | None, drafter: str | None, prompts: str | None, max_new_tokens: int, dtype: str,
    device: str | Placement | None, threads: int | None = None,
) -> list[Finding]:  # fmt: skip
    """Run all checks. A UserError (missing or wrong file) passes through; a wrong result is a FAIL finding."""
    findings = check_versions()
    engine = open_engine(bundle, target, drafter, dtype, device, threads)
    machine = describe(engine.target.device)
    findings.append(Finding("ok", "machine", f"{machine['device']}, {machine['threads']} threads"))
    if bundle is not None:
        findings.append(Finding("ok", "bundle", f"{bundle}: every hash matches, made for this target and drafter"))
    texts = [engine.target.tokenizer(text)["input_ids"] for text in PROMPTS]
    if prompts is not None:
        from ecospec_runtime.prompts import read_prompts

        tokenizer = engine.target.tokenizer
        texts = [row.encode(tokenizer, 512) for row in read_prompts(prompts, tokenizer, MOST_PROMPTS)]
    config = GenerationConfig(max_new_tokens=max_new_tokens)
    plain = [[t.id for t in engine.generate(ids, config)] for ids in texts]
    if engine.target.dtype == torch.float32:
        findings.append(check_reference(engine.target, texts, plain, max_new_tokens))
    for policy in policies_to_try(engine):
        findings.append(check_policy(engine, policy, texts, plain, config))
    if engine.drafter is not None and engine.drafter.kind == "eagle3":
        findings += check_head(engine.target, engine.drafter, texts, plain)
    return findings


def check_versions() -> list[Finding]:
    """Whether the libraries are recent enough."""
    found, out = versions(), []
    for package, oldest in OLDEST.items():
        if package in found:
            numbers = tuple(int(part) for part in found[package].split("+")[0].split(".")[:2])
            wanted = ".".join(map(str, oldest))
            late = numbers >= oldest
            text = f"{found[package]}" if late else f"{found[package]} is older than {wanted}; pip install -U {package}"
            out.append(Finding("ok" if late else "FAIL", package, text))
    return out


def open_engine(
    bundle: Path | None, target: str | None, drafter: str | None, dtype: str, device: str | Placement | None,
    threads: int | None,
) -> Engine:  # fmt: skip
    """An engine that follows `off`, from a bundle or from a bare target and drafter."""
    if bundle is not None:
        loaded_bundle = load_bundle(bundle)
        engine = Engine.from_bundle(loaded_bundle, target, drafter, "off", dtype, device, threads)
        if engine.profile is None:  # of another machine or dtype: what it costs does not matter here
            engine.profile = next((policy.profile for policy in loaded_bundle.policies.values()), None)
        return engine
    from ecospec_runtime.drafters import load_drafter

    assert target is not None
    assert drafter is not None
    loaded = Target.from_pretrained(target, dtype, device)
    return Engine(loaded, load_drafter(drafter, loaded, dtype))


def policies_to_try(engine: Engine) -> list[str]:
    """A policy that always drafts; with a predictor, those that use it as well."""
    if engine.scorer.predictor is None:
        return [POLICY]
    return [POLICY, "ratio"] + ["throughput:price=0,pause=0"] * (engine.profile is not None)


def check_reference(target: Target, texts: list[list[int]], plain: list[list[int]], new_tokens: int) -> Finding:
    """Plain decoding here against transformers' own greedy search."""
    wrong = []
    for i, ids in enumerate(texts):
        (own,) = transformers_greedy(target, [ids], new_tokens)
        if first_divergence(own, plain[i]) is not None:
            wrong.append(i + 1)
    if wrong:
        return Finding("FAIL", "plain decoding", f"differs from transformers' generate() on prompts {wrong}")
    return Finding("ok", "plain decoding", f"equals transformers' generate() on {len(texts)} prompts")


def check_policy(
    engine: Engine, policy: str, texts: list[list[int]], plain: list[list[int]], config: GenerationConfig
) -> Finding:
    """Greedy text under a policy against plain decoding; in bfloat16 a near tie is only a warning."""
    speculating = engine.with_policy(policy)
    wrong, gaps, tokens, passes = [], [], 0, 0
    for i, ids in enumerate(texts):
        stream = speculating.generate(ids, config)
        found = [token.id for token in stream]
        tokens, passes = tokens + stream.statistics.tokens, passes + stream.statistics.passes
        if first_divergence(plain[i], found) is not None:
            wrong.append(i + 1)
            part = divergence(engine.target, ids, plain[i], found)
            gaps.append(abs(part.gap) if part else float("inf"))
    length = f"{tokens / max(1, passes):.2f} tokens a pass"
    if not wrong:
        return Finding("ok", policy, f"same tokens as plain decoding on {len(texts)} prompts, {length}")
    exact = engine.target.dtype == torch.float32
    message = f"differs from plain decoding on prompts {wrong} (largest logit gap {max(gaps):.3g}), {length}"
    if exact or max(gaps) > NEAR_TIE:
        return Finding("FAIL", policy, message + "; do not serve this: the target or the drafter's cache is wrong")
    return Finding("warn", policy, message + "; near ties that flip with the shape of a pass, as bfloat16 does")


def check_head(target: Target, drafter: Any, texts: list[list[int]], plain: list[list[int]]) -> list[Finding]:
    """What an EAGLE-3 head gets right by itself, and whether its neighbouring target layers would do better."""
    found = [Finding("warn", "draft head", note) for note in drafter.notes]
    chains = measure(target, drafter, list(zip(texts, plain, strict=True)))
    own = chains[0]
    if len(own.right) < FEWEST:
        reason = f"too few positions to measure acceptance ({len(own.right)}); give longer prompts or --max-new-tokens"
        return [*found, Finding("ok", "draft head", reason)]
    message = (
        f"its own greedy chain on layers {own.layers} has {own.first:.0%} of first tokens right and {own.mean:.2f} of "
        f"{DEPTH} tokens, over {len(own.right)} positions"
    )
    better = better_neighbour(chains)
    if better is not None:
        found.append(Finding(
            "warn", "draft head",
            f"{message}; layers {better.layers} would have {better.mean:.2f} right, so the layer ids look one off: write "
            f'"{IDS}": {list(better.layers)} at the top level of the head\'s config.json and no other ids',
        ))  # fmt: skip
    elif own.first < LITTLE:
        found.append(Finding("warn", "draft head", f"{message}; a head made for this target does far better"))
    else:
        found.append(Finding("ok", "draft head", message))
    return found
