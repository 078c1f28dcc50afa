"""The report on acceptance models: groups of text, what is judged, oracles, and the files it leaves."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecospec_runtime.acceptance import KINDS
from ecospec_runtime.errors import UserError
from ecospec_runtime.predictor import Predictor
from ecospec_runtime.scoring import Scorer
from ecospec_train.calibrate import calibration_error
from ecospec_train.fit import FitConfig, fit
from ecospec_train.reliability import RELIABILITY_PLOT, reliability
from ecospec_train.traces import Traces
from pipelines.benchmark.acceptance import (
    Told,
    collect,
    judged_prompts,
    main,
    prompt_texts,
    read_texts,
    text_groups,
    truth,
)
from tests.train.invented import make_profile
from tests.train.synthetic import EXPERTS, LAYERS, write_traces


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Traces and a hasty predictor."""
    traces = write_traces(tmp_path_factory.mktemp("traces"), prompts=10, positions=8)
    out = tmp_path_factory.mktemp("fit")
    fit(FitConfig(traces=traces, out=out, width=16, epochs=2, heldout=0.4))
    return traces, out


def test_texts_are_told_apart_by_what_repeats() -> None:
    plain, other = list(range(100, 120)), list(range(200, 220))
    template = [*plain[:12], 7, 8, 9]
    loops = [1, 2, 3] * 5
    assert text_groups([plain, other, loops], None) == ["other", "other", "loops"]
    assert text_groups([template, plain], None) == ["template", "template"]
    prompts = ["x = f(1)\nreturn g(x[0])", "    The quick brown fox jumps over the lazy dog."]
    assert text_groups([plain, other], prompts) == ["code", "prose"]
    assert text_groups([[1]], None) == ["other"]


def test_nodes_are_judged_where_their_parent_is_reached(folders: tuple[Path, Path]) -> None:
    traces, predictor = Traces(folders[0]), Predictor.from_folder(folders[1])
    told = Told(predictor)
    texts = read_texts(traces, predictor, told, set(range(10)))
    scorer, embed = Scorer(told, "head", LAYERS, EXPERTS), traces.embedding()  # type: ignore[arg-type]
    judged = 0
    for shard in traces.shards():
        for row in range(len(shard)):
            pool, after = shard.pool(row), shard.next_tokens_of(row).tolist()
            label, where = truth(pool, np.array(after))
            on_path = [-1]
            for node, (token, parent) in enumerate(zip(pool.tokens.tolist(), pool.parents.tolist(), strict=True)):
                assert where[node] == (parent in on_path)
                assert label[node] == (token == after[parent + 1])
                if where[node] and label[node]:
                    on_path.append(node)
            judged += int(where.sum())
            assert scorer.score(pool, embed, False).acceptance == pytest.approx(label, abs=1e-6)
    estimates, label = collect(list(texts.values()))
    assert {len(label), *(len(values) for values in estimates.values())} == {judged}


def test_the_report_holds_every_kind_and_the_oracles_on_top(folders: tuple[Path, Path], tmp_path: Path) -> None:
    traces, predictor = folders
    profile = tmp_path / "profile.json"
    profile.write_text(make_profile().model_dump_json())
    out = tmp_path / "acceptance.md"
    main(["--traces", str(traces), "--predictor", str(predictor), "--profile", str(profile), "--out", str(out)])
    figures = json.loads(out.with_suffix(".json").read_text())["groups"]
    every = figures["all"]
    assert set(every["log_loss"]) == set(every["calibration_error"]) == set(KINDS)
    fitted = json.loads((predictor / "metrics.json").read_text())["acceptance"]
    for kind in KINDS:  # the report reads pools one by one, as decoding does; the fit reads tables
        assert every["log_loss"][kind] == pytest.approx(fitted[kind]["log_loss"], rel=1e-2)
    rates = every["tokens_per_ms"]
    assert rates["both perfect"] >= rates["perfect acceptance"] * 0.999
    assert rates["perfect acceptance"] > max(rates[kind] for kind in KINDS)
    assert "both perfect" in out.read_text()


def test_traces_are_judged_as_a_whole_only_where_the_fit_had_no_part_of_them(folders: tuple[Path, Path]) -> None:
    traces, predictor = Traces(folders[0]), Predictor.from_folder(folders[1])
    held = set(predictor.manifest.heldout_prompts)
    assert judged_prompts(traces, predictor, unseen=False) == held
    with pytest.raises(UserError, match="fitted on them; leave out --unseen"):
        judged_prompts(traces, predictor, unseen=True)
    predictor.manifest.traces = "others"
    assert judged_prompts(traces, predictor, unseen=True) > held
    with pytest.raises(UserError, match="add --unseen"):
        judged_prompts(traces, predictor, unseen=False)


def test_prompts_of_another_harvest_are_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text('{"prompt": "other"}\n')
    with pytest.raises(UserError, match="not the prompts"):
        prompt_texts(other, Traces(folders[0]))


def test_fit_leaves_a_reliability_plot(folders: tuple[Path, Path]) -> None:
    pytest.importorskip("matplotlib")
    assert (folders[1] / RELIABILITY_PLOT).read_bytes().startswith(b"\x89PNG")


@given(st.lists(st.tuples(st.floats(0, 1, width=32), st.sampled_from([0.0, 1.0])), min_size=1, max_size=60))
def test_reliability_bins_add_up_to_the_calibration_error(pairs: list[tuple[float, float]]) -> None:
    estimate, label = (np.array(column, np.float32) for column in zip(*pairs, strict=True))
    mean, found, counts = reliability(estimate, label)
    assert counts.sum() == len(pairs)
    assert np.abs((mean - found) * counts).sum() / len(pairs) == pytest.approx(
        calibration_error(estimate, label), abs=1e-5
    )
