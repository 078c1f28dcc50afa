"""The benchmark of text and drafters that nothing was tuned for, and the drafters it needs: one that lies, one of other text."""

from __future__ import annotations

import argparse
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ecospec_runtime.bench import measure
from ecospec_runtime.config import PoolConfig
from ecospec_runtime.drafters import load_drafter
from ecospec_runtime.engine import Engine
from ecospec_runtime.errors import UserError
from ecospec_runtime.pool import Pool
from ecospec_runtime.target import Target
from ecospec_train.choice import Measured
from pipelines.benchmark import adversarial
from pipelines.benchmark.liar import write_liar
from pipelines.reference import foreign
from tests.bundles import write_bundle
from tests.models import save_tiny_drafter
from tests.mtp_layers import deepseek_family

TEXTS = ("def f(x):", "import os", "for i in x:")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory, tiny_target_dir: Path, tiny_drafter_dir: Path) -> Path:
    """What a quickstart leaves, of the tiny models; every other token ends a text."""
    folder = tmp_path_factory.mktemp("run")
    write_bundle(folder, tiny_target_dir, tiny_drafter_dir)
    shutil.copytree(tiny_target_dir, folder / "target")
    settings = folder / "target" / "generation_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"eos_token_id": list(range(0, 96, 2))}))
    (folder / "bench.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))
    return folder


def arguments(run: Path, out: Path, *further: str) -> list[str]:
    """Of a short run."""
    sizes = ["--prompts", "2", "--tokens", "6", "--dtype", "float32"]
    return ["--run", str(run), "--out", str(out), *sizes, *further]


def first_pool(folder: Path, target: Target) -> Pool:
    """A pool after a fixed text."""
    drafter: Any = load_drafter(folder, target)
    ids = torch.tensor([5, 9, 23, 41, 8, 60, 2])
    aux = target.forward(ids, torch.arange(len(ids)), None, target.new_cache(), aux_layers=drafter.aux_layers).aux
    assert aux is not None
    sequence = drafter.start()
    drafter.extend(sequence, ids[1:], aux[:-1])
    return drafter.expand_many(sequence, [len(ids) - 2], PoolConfig(depth=3, beam=1, width=2))[0]  # type: ignore[no-any-return]


def test_every_set_is_measured_with_its_drafter_and_engines_of_its_own(
    run_dir: Path, tmp_path: Path, tiny_drafter_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def watched(entrants: Any, plan: Any) -> Any:
        seen.extend((entrant.engine, plan) for entrant in entrants)
        return measure(entrants, plan)

    monkeypatch.setattr(adversarial, "measure", watched)
    monkeypatch.setattr("ecospec_runtime.bench.WARM_UP_TOKENS", 1)
    monkeypatch.setattr(adversarial, "BAR", 0.0)
    stranger, out = save_tiny_drafter(tmp_path / "stranger", seed=9), tmp_path / "docs" / "tiny.md"
    more = ("--foreign", str(stranger), "--policies", "confidence:budget=2,acceptance=raw")
    adversarial.main(arguments(run_dir, out, *more))
    report = json.loads(out.with_suffix(".json").read_text())
    labels = ["off", "throughput (tuned)", "confidence:budget=2,acceptance=raw"]
    places = [("random text", 0.0), ("random text", 0.7), ("high temperature", 1.0), ("high temperature", 1.5),
              ("foreign drafter", 0.0), ("foreign drafter", 0.7), ("liar", 0.0), ("liar", 0.7)]  # fmt: skip
    rows = report["rows"]
    assert [(r["set"], r["temperature"], r["label"]) for r in rows] == [(*p, label) for p in places for label in labels]
    assert all(row["identical_to_off"] and row["tokens"] == 12 for row in rows), "no text ends early"
    assert all((row["drafted"] > 0.3) == (row["label"] != "off") for row in rows if row["policy"] != "throughput")
    assert len({id(engine) for engine, _ in seen}) == len(rows), "an engine was used twice"
    own, other = (load_drafter(f, seen[0][0].target).fingerprint for f in (tiny_drafter_dir, stranger))
    used = [engine.drafter.fingerprint for engine, _ in seen]
    assert used[:12] == [own] * 12 and used[12:18] == [other] * 6 and not {own, other} & set(used[18:])
    text = out.read_text()
    assert "Held in 8 of 8" in text and text.count("| 2 of 2 |") == len(rows)
    assert report["policy"].startswith("throughput:price=0.15")


def test_random_prompts_are_drawn_from_the_whole_vocabulary() -> None:
    first, again = (adversarial.random_prompts(50, 96, seed=3) for _ in range(2))
    assert first == again != adversarial.random_prompts(50, 96, seed=4)
    assert len(first) == 50 and {len(p) for p in first} == {adversarial.RANDOM_PROMPT}
    assert {t for p in first for t in p} == set(range(96))


def measured(low: float, high: float) -> Measured:
    middle = math.sqrt(low * high)
    return Measured(policy="p", speedup=middle, low=low, high=high, median=middle, tokens_per_second=1.0, prompts=4)


def row(name: str, label: str, low: float, high: float) -> dict[str, Any]:
    return {
        "set": name, "temperature": 0.7, "label": label, "policy": label.split()[0], "tokens_per_second": 10.0,
        "accept_length": 1.5, "drafted": 0.25, "prompts": 4, "diverging_prompts": 1, **adversarial.judged(measured(low, high)),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("low", "high", "said"), [(0.985, 1.1, "yes"), (0.95, 1.1, "yes ?"), (0.9, 1.0, "no ?"), (0.5, 0.97, "no")]
)
def test_the_bar_and_what_the_interval_says_of_it(low: float, high: float, said: str) -> None:
    assert adversarial.cells(row("liar", "ratio (tuned)", low, high))[-1] == said


@pytest.mark.parametrize("low", [0.97, 0.5])
def test_below_the_bar_the_report_is_written_and_the_command_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, low: float
) -> None:
    rows = [row("liar", "off", 1.0, 1.0), row("liar", "ratio (tuned)", low, 1.0), row("liar", "confidence", 0.3, 0.4)]
    machine = {"device": "d", "threads": 1, "versions": {"torch": "2"}}
    report = {"target": "t", "dtype": "bfloat16", "machine": machine, "policy": "ratio", "prompts": 4, "rows": rows,
              "max_new_tokens": 8, "sets": {"liar": "lies"}}  # fmt: skip
    monkeypatch.setattr(adversarial, "run", lambda args: report)
    out = tmp_path / "x.md"
    if low < 0.9:
        with pytest.raises(SystemExit, match="1"):
            adversarial.main(arguments(tmp_path, out))
    else:
        adversarial.main(arguments(tmp_path, out))
    assert json.loads(out.with_suffix(".json").read_text())["rows"] == rows
    assert f"Held in {int(low > 0.9)} of 1" in out.read_text()
    assert "| 25.0% | 3 of 4 |" in out.read_text()


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("bundle", "make quickstart"),
        ("bench.jsonl", "make quickstart"),
        ("--foreign", "no such folder"),
        ("--drafter", "liar"),
    ],
)
def test_a_missing_piece_is_one_line(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], missing: str, said: str
) -> None:
    run, more = run_dir, ()
    if missing.startswith("--"):
        more = (missing, str(tmp_path / "none") if missing == "--foreign" else "ngram")
    else:
        run = Path(shutil.copytree(run_dir, tmp_path / "run"))
        (run / missing).rename(run / "elsewhere")
    with pytest.raises(SystemExit) as left:
        adversarial.main(arguments(run, tmp_path / "out.md", *more))
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert left.value.code == 2
    assert line.startswith("error: ") and (said in line or missing == "--drafter")
    assert not (tmp_path / "out.md").exists()


def test_a_drafter_whose_states_the_predictor_cannot_read_is_refused(run_dir: Path) -> None:
    base = Engine.from_bundle(run_dir / "bundle", run_dir / "target", policy="off")
    with pytest.raises(UserError, match="ngram: features target_hidden"):
        adversarial.with_drafter(base, "ngram")


@pytest.mark.parametrize("kind", ["head", "layer"])
def test_a_liar_is_surer_and_names_other_tokens(
    tmp_path: Path, tiny_target_dir: Path, tiny_drafter_dir: Path, kind: str
) -> None:
    honest = tiny_drafter_dir
    if kind == "layer":
        deepseek_family(tmp_path)
        honest = tmp_path / "target"
    target = Target.from_pretrained(honest if kind == "layer" else tiny_target_dir, dtype="float32")
    liar = write_liar(str(honest), tmp_path / "liar")
    true, lie = first_pool(honest, target), first_pool(liar, target)
    assert true.tokens[0] != lie.tokens[0]
    assert lie.log_probs[0] > true.log_probs[0]
    assert lie.entropies[1] < 0.7 * true.entropies[1]


def test_foreign_text_is_all_but_programs(tmp_path: Path) -> None:
    prose = "".join(f"Line {'x' * (i % 9)} of a page about nothing much.\n" for i in range(40))
    for name, text in (("a/README.md", prose), ("a/code.py", prose), ("b/METADATA", prose + "more\n"), ("b/copy.txt", prose),
                       ("b/table.txt", "0123 " * 400), ("c/style.css", prose * 2)):  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert sorted(foreign.foreign_files(tmp_path)) == sorted([prose, prose + "more\n", prose * 2])


def test_foreign_drafters_are_of_the_targets_own_kind_and_compared_with_it(
    tmp_path: Path, tiny_target_dir: Path, tiny_drafter_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = argparse.Namespace(out=Path("o"), target=Path("t"), minutes=2, seed=3)
    assert foreign.training(args, "mtp")[0].endswith("mtp")
    line = foreign.training(args, "eagle3")
    assert line[0].endswith("head") and "--own" not in line and "--init" not in line, "nothing of the target's text"
    monkeypatch.setattr(foreign, "LENGTH", 12)
    np.save(tmp_path / "bench.npy", np.random.default_rng(0).integers(1, 96, 400).astype(np.uint16))
    target = Target.from_pretrained(tiny_target_dir, dtype="float32")
    stranger = save_tiny_drafter(tmp_path / "stranger", seed=9)
    found = foreign.compare(target, {"own": tiny_drafter_dir, "foreign": stranger}, tmp_path / "bench.npy", 4)
    assert found["own"]["positions"] == found["foreign"]["positions"] > 0
    assert found["own"] != found["foreign"]
