"""Fixtures of the runtime's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bundles import write_bundle
from tests.mtp_layers import Family, deepseek_family, glm_family


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory, tiny_target_dir: Path, tiny_drafter_dir: Path) -> Path:
    """A bundle for the tiny target and drafter. Copy it before you damage it."""
    return write_bundle(tmp_path_factory.mktemp("bundle"), tiny_target_dir, tiny_drafter_dir)


@pytest.fixture(scope="session")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """A tiny DeepSeek-V3 with its MTP layer, loaded."""
    return deepseek_family(tmp_path_factory.mktemp("deepseek"))


@pytest.fixture(scope="session")
def deepseek_full_rank(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """The same with queries of full rank, halves rotated instead of pairs, weights that are not normalised."""
    settings = {"q_lora_rank": None, "rope_interleave": False, "norm_topk_prob": False}
    return deepseek_family(tmp_path_factory.mktemp("full"), **settings)


@pytest.fixture(scope="session")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """A tiny GLM-4-MoE with its MTP layer, loaded."""
    return glm_family(tmp_path_factory.mktemp("glm"))
