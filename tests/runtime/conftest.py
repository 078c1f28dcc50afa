"""Fixtures of the runtime's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bundles import write_bundle


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory, tiny_target_dir: Path, tiny_drafter_dir: Path) -> Path:
    """A bundle for the tiny target and drafter. Copy it before you damage it."""
    return write_bundle(tmp_path_factory.mktemp("bundle"), tiny_target_dir, tiny_drafter_dir)
