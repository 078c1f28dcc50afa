"""The shape of the repository: layout, direction of imports, an import without the training extras, file sizes."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# What a machine with the base install alone lacks; numba (extra `cpu`), matplotlib and datasets may only be imported late.
EXTRAS = ("lightning", "datasets", "optuna", "mlflow", "onnx", "onnxscript", "pyarrow", "scipy", "matplotlib",
          "numba", "ecospec_train")  # fmt: skip
FORBIDDEN = {
    "kernels/ecospec_kernels": {"transformers", "onnxruntime", "ecospec_runtime", "ecospec_train", "pipelines"},
    "ecospec_runtime": {"lightning", "optuna", "mlflow", "onnx", "pyarrow", "scipy", "ecospec_train", "pipelines"},
    "ecospec_train": {"pipelines"},
}
NAMES = ("pyproject.toml", "Makefile", "README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "constraints.txt",
         ".ci/run", ".pre-commit-config.yaml", "mlruns/README.md", "docs", "kernels/ecospec_kernels",
         "ecospec_runtime", "ecospec_train", "pipelines/reference", "tests/runtime", "tests/train", "tests/ops")  # fmt: skip


def tracked() -> list[Path]:
    """Files git knows, or every file outside the usual caches when this is not a checkout."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True)
    if done.returncode == 0 and done.stdout:
        return [ROOT / name for name in done.stdout.decode().split("\0") if name and (ROOT / name).is_file()]
    skip = {".venv", "runs", ".git"}
    return [p for p in ROOT.rglob("*") if p.is_file() and not skip & set(p.relative_to(ROOT).parts)]


def imported(path: Path) -> set[str]:
    """Top-level packages that a file imports, wherever the import stands."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names


def test_layout_has_the_agreed_names() -> None:
    assert [name for name in NAMES if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("package", sorted(FORBIDDEN))
def test_imports_point_one_way(package: str) -> None:
    wrong = {
        str(path.relative_to(ROOT)): found
        for path in (ROOT / package).rglob("*.py")
        if (found := sorted(imported(path) & FORBIDDEN[package]))
    }
    assert wrong == {}


def test_only_tracking_imports_mlflow() -> None:
    users = [p.name for p in (ROOT / "ecospec_train").rglob("*.py") if "mlflow" in imported(p)]
    assert users == ["tracking.py"]


def test_kernels_is_a_source_root_and_never_a_package() -> None:
    assert not (ROOT / "kernels/__init__.py").exists()
    assert not [p for p in (ROOT / "tests").rglob("kernels") if p.is_dir()]
    code = "import transformers.models.qwen3_moe.modeling_qwen3_moe"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_runtime_imports_without_the_training_extras() -> None:
    modules = sorted(
        ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for p in (ROOT / "ecospec_runtime").rglob("*.py")
    )
    code = (
        "import importlib, importlib.abc, importlib.util, sys\n"
        f"blocked = {EXTRAS!r}\n"
        "class Block(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in blocked:\n"
        "            raise ModuleNotFoundError(f'{name} is a training extra', name=name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "real = importlib.util.find_spec\n"  # how libraries ask whether another one is there
        "importlib.util.find_spec = lambda n, p=None: None if n.split('.')[0] in blocked else real(n, p)\n"
        f"for module in {modules!r}:\n"
        "    importlib.import_module(module)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_no_large_file_but_the_reference_weights() -> None:
    families = ROOT / "pipelines/reference/families"
    limits = {ROOT / "pipelines/reference/model": 42_000_000} | {
        family: 20_000_000 for family in families.iterdir() if family.is_dir()
    }
    files = tracked()
    large = [p for p in files if p.stat().st_size > 2_000_000]
    assert [str(p) for p in large if limits.keys().isdisjoint(p.parents)] == []
    for folder, limit in limits.items():
        assert sum(p.stat().st_size for p in files if folder in p.parents) <= limit, folder


def test_no_absolute_machine_path_is_committed() -> None:
    pattern = re.compile(r"(?<![\w.$}>])/(?:work|home|root|Users|mnt|tmp/team)/\w")
    suffixes = {".py", ".toml", ".md", ".yaml", ".yml", ".sh", ".txt", ".json", ".cfg", ""}
    wrong = []
    for path in tracked():
        if path.suffix in suffixes and path != Path(__file__).resolve() and path.stat().st_size < 2_000_000:
            text = path.read_text(encoding="utf-8", errors="ignore")
            wrong += [f"{path.relative_to(ROOT)}: {m.group()}" for m in pattern.finditer(text)]
    assert wrong == []


def test_sources_stay_small_and_documented() -> None:
    wrong = []
    for root in ("ecospec_runtime", "ecospec_train", "kernels", "pipelines"):
        for path in (ROOT / root).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            if len(text.splitlines()) > 400:
                wrong.append(f"{path.relative_to(ROOT)}: {len(text.splitlines())} lines")
            if text.strip() and ast.get_docstring(ast.parse(text)) is None:
                wrong.append(f"{path.relative_to(ROOT)}: no module docstring")
    assert wrong == []
