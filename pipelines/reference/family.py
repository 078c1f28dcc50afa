"""Build a reference of another architecture from the first one: corpus, texts, target, drafter, report.

    python -m pipelines.reference.family --family pipelines/reference/families/gpt-oss.yaml --out runs/reference/gpt-oss

What `runs/reference` holds already (corpus, the first reference's own text) is used again. Leaves `target/`, for an EAGLE-3
head `drafter/`, `manifest.json` and `report.md` in the output folder.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

import yaml

from pipelines.reference.distill import TEACHER

FAMILIES = Path("pipelines/reference/families")


def steps(family: Path, shared: Path, out: Path) -> list[list[str]]:
    """Module and arguments of every step that is still to do."""
    about = yaml.safe_load(family.read_text())
    missing = sorted({"model_type", "config", "drafter", "minutes"} - set(about or {}))
    if missing:
        raise SystemExit(f"error: {family}: key {missing[0]} is missing; compare it with {FAMILIES}/gpt-oss.yaml")
    minutes = {name: ["--minutes", str(value)] for name, value in about["minutes"].items()}
    corpus = ["--corpus", str(shared / "corpus")]
    todo = []
    if not (shared / "corpus" / "manifest.json").exists():
        todo.append(["corpus", "--out", str(shared / "corpus")])
    if not (shared / "own.npy").exists():
        todo.append(["own_text", *corpus, "--target", str(TEACHER), "--out", str(shared / "own.npy")])
    mtp = about["drafter"] == "mtp"
    base, own = out / ("base" if mtp else "target"), str(out / "own.npy")
    todo.append(
        [
            "distill",
            *corpus,
            "--family",
            str(family),
            "--own",
            str(shared / "own.npy"),
            "--out",
            str(base),
            *minutes["target"],
        ]
    )
    todo.append(["own_text", *corpus, "--target", str(base), "--out", own, "--minutes", "4"])
    drafter = out / ("target" if mtp else "drafter")  # an MTP layer lies in the target's checkpoint
    kind = ["mtp"] if mtp else ["head", "--shared-embedding"]
    todo.append([*kind, *corpus, "--target", str(base), "--own", own, "--out", str(drafter), *minutes["drafter"]])
    todo.append(["report", *corpus, "--target", str(out / "target"), "--head", str(drafter), "--out", str(out)])
    return todo


def main() -> None:
    """Command line entry; see the module docstring."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--family", type=Path, required=True, help="YAML of the architecture")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--shared", type=Path, default=Path("runs/reference"), help="folder of corpus and teacher's text"
    )
    args = parser.parse_args()
    if not args.family.is_file():
        known = ", ".join(sorted(path.stem for path in FAMILIES.glob("*.yaml")))
        parser.error(f"{args.family}: no such file; the families here are {known}")
    started = time.monotonic()
    for module, *arguments in steps(args.family, args.shared, args.out):
        print(f"\n== {module} ({(time.monotonic() - started) / 60:.0f} min)", flush=True)
        subprocess.run([sys.executable, "-m", f"pipelines.reference.{module}", *arguments], check=True)
    print(f"\n== done in {(time.monotonic() - started) / 60:.0f} min: {args.out}")


if __name__ == "__main__":
    main()
