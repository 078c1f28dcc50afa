"""What several tests hold decoding against: a drafter that knows the text half of the time, and exact distributions."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from scipy import stats
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from ecospec_runtime.target import Target


def mixed_drafter(texts: list[list[int]], stub_drafter: Any) -> Any:
    """Proposes the right token of these texts in the company of wrong ones, at any rank, or not at all."""
    rng = random.Random(3)
    known = {tuple(text[1:end]): text[end] for text in texts for end in range(1, len(text))}

    def propose(context: list[int], path: list[int]) -> list[int]:
        right = known.get(tuple(context + path), 1)
        wrong = [(right + shift) % 96 for shift in rng.sample(range(1, 96), 3)]
        place = rng.choice([0, 0, 0, 1, 2, None])
        return wrong if place is None else [*wrong[:place], right, *wrong[place:]]

    return stub_drafter(propose)


def exact_distributions(target: Target, prompt: list[int], text: list[int], settings: dict[str, Any]) -> np.ndarray:
    """Transformers' processed distribution of every token of `text`, float64 `[len(text), vocabulary]`."""
    chain = LogitsProcessorList([TemperatureLogitsWarper(settings["temperature"])])
    if "top_k" in settings:
        chain.append(TopKLogitsWarper(settings["top_k"]))
    if "top_p" in settings:
        chain.append(TopPLogitsWarper(settings["top_p"]))
    with torch.inference_mode():
        logits = target.model(torch.tensor([prompt + text])).logits[0, len(prompt) - 1 : -1].double()
    return chain(torch.zeros(len(text), 1, dtype=torch.long), logits).softmax(-1).numpy()


def chi_square(text: list[int], distributions: np.ndarray) -> float:
    """p-value of the text under distributions `[len(text), vocabulary]`; 0 if one of its tokens is impossible."""
    vocabulary = distributions.shape[1]
    if not np.all(distributions[np.arange(len(text)), text] > 0):
        return 0.0
    excess = (np.eye(vocabulary)[text] - distributions).sum(0)
    covariance = np.diag(distributions.sum(0)) - distributions.T @ distributions
    statistic = excess @ np.linalg.pinv(covariance, hermitian=True) @ excess
    return float(stats.chi2.sf(statistic, vocabulary - 1))
