"""What a measurement ran on: the device's name, its file-name form, and the versions of everything that matters."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import torch

from ecospec_runtime.errors import UserError, first_line

PACKAGES = ("ecospec", "torch", "transformers", "triton", "onnxruntime", "numpy", "numba", "lightning", "optuna")
DECIDE_SPEED = ("torch", "transformers", "triton", "numba")


def device_name(device: str | torch.device = "cpu") -> str:
    """Human-readable name of the processor or GPU that `device` means."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return " ".join(line.split(":", 1)[1].split())
    except OSError:
        pass
    return platform.processor() or platform.machine()


def check_device(device: str) -> None:
    """Raise UserError, with torch's reason, unless tensors can live on `device`."""
    remedy = "cpu always can, cuda needs a GPU and a torch for it"
    try:
        place = torch.zeros(1, device=device).device
    except (RuntimeError, AssertionError) as error:  # AssertionError: a torch without CUDA
        raise UserError(f"device '{device}' cannot be used here ({first_line(error)}); {remedy}") from error
    if place.type == "meta":
        raise UserError(f"device '{device}' cannot be used here (it computes nothing); {remedy}")


def device_slug(name: str, dtype: str, threads: int) -> str:
    """File-name form of device, dtype and thread count: what a policy or profile is valid for."""
    words = re.sub(r"\((?:r|tm)\)|\bcpu\b|@.*", " ", name.lower())
    return "-".join([*re.findall(r"[a-z0-9.]+", words), dtype, f"{threads}t"])


def versions() -> dict[str, str]:
    """Installed versions of Python and of the packages that decide speed and results."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def other_versions(then: Mapping[str, str]) -> str:
    """Which packages that decide speed are not what they were `then`: "torch 2.12.0, now 2.13.0"; empty if all are."""
    now = versions()
    changed = [name for name in DECIDE_SPEED if name in then and then[name] != now.get(name)]
    return "; ".join(f"{name} {then[name]}, now {now.get(name, 'not installed')}" for name in changed)


def describe(device: str | torch.device = "cpu") -> dict[str, object]:
    """The `machine` entry of a benchmark: device, cores, threads, memory, system, versions."""
    memory = 0.0
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return {
        "device": device_name(device),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(memory, 1),
        "system": f"{platform.system()} {platform.release()}",
        "versions": versions(),
    }


def git_commit(folder: Path | None = None) -> str | None:
    """Commit of the checkout EcoSpec runs from, with `+` if files differ from it; None outside a checkout."""
    root = folder or Path(__file__).resolve().parents[1]
    try:
        top = subprocess.run(["git", "rev-parse", "--show-toplevel", "HEAD"], cwd=root, capture_output=True, text=True)
        lines = top.stdout.split("\n")
        if top.returncode or Path(lines[0]).resolve() != root:
            return None
        dirty = subprocess.run(["git", "status", "--porcelain", "-uno"], cwd=root, capture_output=True, text=True)
    except OSError:
        return None
    return lines[1] + ("+" if dirty.stdout.strip() else "")
