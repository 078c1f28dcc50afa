"""The predictor at decoding time: top-k masks, garbage tolerance, damaged folders, agreement of Scorer and network."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from ecospec_kernels import dispatch
from ecospec_runtime.acceptance import AcceptanceModel, LogisticWeights
from ecospec_runtime.errors import UserError
from ecospec_runtime.pool import Candidates, Pool, pack_masks
from ecospec_runtime.predictor import Prediction, Predictor, PredictorManifest, PredictorShapes, predicted_masks, shrink
from ecospec_runtime.scoring import Scorer
from ecospec_train.fit import write_folder
from ecospec_train.predictor_export import check_export, export_network
from ecospec_train.predictor_model import PredictorNetwork

LAYERS, EXPERTS, TOP_K, HIDDEN, WIDTH, NODES = 3, 12, 2, 8, 10, 5
SHAPES = PredictorShapes(hidden=HIDDEN, state=WIDTH, layers=LAYERS, experts=EXPERTS, top_k=TOP_K)
MODEL = AcceptanceModel(best="head", temperature=0.5, logistic=LogisticWeights())
MANIFEST = PredictorManifest(
    shapes=SHAPES, target={}, drafter={}, temperature=0.0, traces="", heldout_prompts=[], files={}, config={}, versions={}
)  # fmt: skip


def network() -> PredictorNetwork:
    """A random network whose heads all matter."""
    torch.manual_seed(0)
    net = PredictorNetwork(SHAPES, 16)
    torch.nn.init.normal_(net.acceptance.correction.weight)
    return net.eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete predictor folder."""
    out = tmp_path_factory.mktemp("predictor")
    export_network(network(), out)
    write_folder(out, MODEL, {}, MANIFEST)
    return out


def pool() -> Pool:
    """Five nodes under two expanded states."""
    rng = np.random.default_rng(1)
    return Pool(
        tokens=np.array([4, 2, 7, 1, 3]), parents=np.array([-1, -1, 0, 0, 2]), depths=np.array([1, 1, 2, 2, 3]),
        ranks=np.array([0, 1, 0, 1, 0]), log_probs=np.log(np.array([0.6, 0.2, 0.5, 0.3, 0.9], np.float32)),
        state_rows=np.array([1, 1, 2, 2, 3]), states=rng.normal(size=(4, WIDTH)).astype(np.float16).astype(np.float32),
        entropies=np.array([0.1, 0.2, 0.3, 0.4], np.float32), root_token=9,
    )  # fmt: skip


EMBEDDING = np.random.default_rng(2).normal(size=(10, HIDDEN)).astype(np.float16).astype(np.float32)


def embed(tokens: np.ndarray) -> np.ndarray:
    """Table lookup."""
    return EMBEDDING[tokens]


class Liar:
    """A predictor that returns what it is told to."""

    shapes, acceptance = SHAPES, MODEL

    def __init__(self, routing: np.ndarray, logits: np.ndarray):
        self.prediction = Prediction(routing, logits)

    def predict(self, pool: Pool, embed: object, routing: bool = True) -> Prediction:
        """The lie."""
        return self.prediction


def members(mask: int) -> list[set[int]]:
    """Expert ids per layer of a mask."""
    return [{e for e in range(EXPERTS) if mask >> (layer * EXPERTS + e) & 1} for layer in range(LAYERS)]


def test_scorer_agrees_with_the_network_row_by_row(folder: Path) -> None:
    found = Scorer(Predictor.from_folder(folder), "head", LAYERS, EXPERTS).score(pool(), embed, True)
    p, net = pool(), network()
    rows: list[tuple[int, int | None, int, list[float]]] = [(p.root_token, None, 0, [0.0, 0.0, 0.0, p.entropies[0]])]
    for i in range(NODES):
        row = int(p.state_rows[i])
        parent = p.root_token if p.parents[i] < 0 else int(p.tokens[p.parents[i]])
        rows.append((int(p.tokens[i]), parent, row, [p.log_probs[i], p.ranks[i], p.depths[i], p.entropies[row]]))
    masks, logits = [], []
    for token, parent, row, scalars in rows:
        before = EMBEDDING[[parent]] if parent is not None else np.zeros((1, HIDDEN), np.float32)
        inputs = (EMBEDDING[[token]], before, p.states[[row]], np.array([scalars], np.float32))
        with torch.inference_mode():
            routing, logit = net(*map(torch.from_numpy, inputs))
        masks += pack_masks(routing.topk(TOP_K).indices.numpy(), EXPERTS)
        logits.append(logit.item())
    assert [found.root_mask, *found.masks] == masks
    e = np.exp(logits[1:])
    first, second, third = e[:2] / (1 + e[:2].sum()), e[2:4] / (1 + e[2:4].sum()), e[4] / (1 + e[4])
    assert found.acceptance == pytest.approx([*first, *second, third], rel=1e-4)
    reach = [first[0], first[1], first[0] * second[0], first[0] * second[1], first[0] * second[0] * third]
    assert found.reach == pytest.approx(reach, rel=1e-4)


def test_the_network_reads_what_traces_hold(folder: Path) -> None:
    """Live decoding must choose what replay of float16 traces chooses, to the last bit; states beyond float16 are clipped there."""
    predictor, recorded = Predictor.from_folder(folder), pool()
    recorded.states[2, 1] = 65504.0
    live = replace(recorded, states=recorded.states * np.float32(1.0001))
    expected = predictor.predict(recorded, embed)
    for found, wanted in zip(predictor.predict(live, lambda tokens: embed(tokens) * 1.0001), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_the_kernel_says_what_the_onnx_file_says(folder: Path, tmp_path: Path) -> None:
    """And does not run where the safetensors are missing or hold something else: the ONNX file is what was exported."""
    pytest.importorskip("numba")
    predictor = Predictor.from_folder(folder)
    predictor.manifest.shrinkage = 0.25
    dispatch.CALLS.clear()
    found = predictor.predict(pool(), embed)
    assert dispatch.CALLS == {("predict_pool", "cpu"): 1}
    predictor.weights = None
    for ours, theirs in zip(found, predictor.predict(pool(), embed), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)
    copy = shutil.copytree(folder, tmp_path / "copy")
    weights = load_file(copy / "predictor.safetensors")
    save_file({**weights, "routing.bias": weights["routing.bias"] + 0.1}, copy / "predictor.safetensors")
    assert Predictor.from_folder(copy).weights is None
    save_file({**weights, "routing.bias": torch.tensor(0.1)}, copy / "predictor.safetensors")
    assert Predictor.from_folder(copy).weights is None
    (copy / "predictor.safetensors").unlink()
    assert Predictor.from_folder(copy).weights is None


@pytest.mark.parametrize("kernel", [True, False])
def test_acceptance_alone_is_what_comes_with_routing(folder: Path, kernel: bool) -> None:
    predictor = Predictor.from_folder(folder)
    predictor.weights = predictor.weights if kernel else None
    nothing, alone = predictor.predict(pool(), embed, routing=False)
    assert nothing is None
    np.testing.assert_array_equal(alone, predictor.predict(pool(), embed).acceptance_logits)
    flat = Scorer(predictor, "head", LAYERS, EXPERTS).score(pool(), embed, needs_routing=False)
    np.testing.assert_array_equal(
        flat.reach, Scorer(predictor, "head", LAYERS, EXPERTS).score(pool(), embed, True).reach
    )
    assert flat.masks == []


def test_shrinkage_adds_a_share_of_what_root_and_first_node_agree_on(folder: Path) -> None:
    predictor = Predictor.from_folder(folder)
    plain = predictor.predict(pool(), embed).routing_logits
    predictor.manifest.shrinkage = 0.25
    shrunk = predictor.predict(pool(), embed).routing_logits
    assert shrunk == pytest.approx(plain + 0.25 * plain[:2].mean(0), abs=1e-5)


def test_one_unknown_row_does_not_spread_over_the_pool() -> None:
    logits = np.random.default_rng(0).normal(size=(4, LAYERS, EXPERTS)).astype(np.float32)
    logits[1, 1, 3] = np.nan
    before = logits.copy()
    shrink(logits, 0.1)
    assert np.array_equal(logits, before, equal_nan=True)


def test_without_routing_or_head_the_network_does_not_run(folder: Path) -> None:
    predictor = Predictor.from_folder(folder)
    predictor.session = None
    found = Scorer(predictor, "logistic", LAYERS, EXPERTS).score(pool(), embed, False)
    assert (found.masks, found.root_mask) == ([], 0)
    own, parents = np.exp(pool().log_probs), pool().parents
    siblings = np.array([own[parents == parent].sum() for parent in parents])
    assert found.acceptance == pytest.approx(own / (1 + siblings), rel=1e-4)
    assert Scorer(None, "raw", LAYERS, EXPERTS).score(pool(), embed, False).acceptance[0] == pytest.approx(0.6)


def test_pools_must_carry_the_fitted_temperature_only_when_it_is_used(folder: Path) -> None:
    predictor = Predictor.from_folder(folder)
    assert Scorer(predictor, "temperature", LAYERS, EXPERTS).temperatures == (0.5,)
    assert Scorer(predictor, "head", LAYERS, EXPERTS).temperatures == ()


@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 3, 5, 12]), st.booleans())
@settings(deadline=None)
def test_masks_hold_the_top_k_of_every_layer(seed: int, top_k: int, ties: bool) -> None:
    logits = np.random.default_rng(seed).normal(size=(4, LAYERS, EXPERTS)).astype(np.float32)
    logits = np.round(logits) if ties else logits
    for row, mask in zip(logits, predicted_masks(logits, top_k), strict=True):
        for scores, chosen in zip(row, members(mask), strict=True):
            assert len(chosen) == top_k
            assert set(chosen) == set(np.argsort(-scores, kind="stable")[:top_k])  # of equal ones the lower


def test_unknown_routing_costs_a_full_set_and_leaves_others_alone() -> None:
    logits = np.random.default_rng(0).normal(size=(4, LAYERS, EXPERTS)).astype(np.float32)
    before = predicted_masks(logits, TOP_K)
    logits[1, :, 3], logits[2] = np.nan, np.inf
    after = predicted_masks(logits, TOP_K)
    assert (after[0], after[3]) == (before[0], before[3])
    assert [len(s) for s in members(after[1]) + members(after[2])] == [TOP_K] * LAYERS * 2
    assert after[1] & after[2] == 0


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(width=32), min_size=40, max_size=40), st.integers(0, 2**32 - 1))
def test_a_predictor_that_lies_never_breaks_scoring(values: list[float], seed: int) -> None:
    rng = np.random.default_rng(seed)
    odd = rng.choice(
        np.array([*values, np.nan, np.inf, -np.inf, 3e38, -3e38], np.float32), (NODES + 1, LAYERS, EXPERTS)
    )
    liar = Liar(odd, odd[:, 0, 0])
    found = Scorer(liar, "head", LAYERS, EXPERTS).score(pool(), embed, True)  # type: ignore[arg-type]
    assert isinstance(found, Candidates)
    assert ((found.acceptance >= 0) & (found.acceptance <= 1)).all()
    assert ((found.reach >= 0) & (found.reach <= 1)).all()
    assert [len(s) for mask in [found.root_mask, *found.masks] for s in members(mask)] == [TOP_K] * LAYERS * (NODES + 1)


def test_mistakes_in_what_is_asked_are_named(folder: Path) -> None:
    predictor = Predictor.from_folder(folder)
    with pytest.raises(UserError, match="needs a predictor"):
        Scorer(None, "head", LAYERS, EXPERTS)
    with pytest.raises(UserError, match="48"):
        Scorer(predictor, "head", LAYERS, 48)
    with pytest.raises(UserError, match="unknown kind"):
        Scorer(predictor, "best", LAYERS, EXPERTS)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="predicted experts"):
        Scorer(None, "raw", LAYERS, EXPERTS).score(pool(), embed, True)


def damage(folder: Path, copy: Path) -> Path:
    """A copy to break."""
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


@pytest.mark.parametrize("name", ["predictor.onnx", "acceptance.json", "manifest.json"])
@pytest.mark.parametrize("cut", [True, False])
def test_a_missing_or_truncated_file_is_named(folder: Path, tmp_path: Path, name: str, cut: bool) -> None:
    path = damage(folder, tmp_path) / name
    if cut:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    else:
        path.unlink()
    with pytest.raises(UserError, match=name) as caught:
        Predictor.from_folder(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_graph_of_other_sizes_than_the_manifest_is_refused(folder: Path, tmp_path: Path) -> None:
    path = damage(folder, tmp_path) / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["shapes"]["experts"] = 16
    path.write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="routing_logits"):
        Predictor.from_folder(tmp_path)


def test_more_experts_per_token_than_there_are_are_refused(folder: Path, tmp_path: Path) -> None:
    path = damage(folder, tmp_path) / "manifest.json"
    path.write_text(path.read_text().replace(f'"top_k": {TOP_K}', f'"top_k": {EXPERTS + 1}'))
    with pytest.raises(UserError, match="top_k 13 of 12 experts"):
        Predictor.from_folder(tmp_path)


def test_export_is_compared_with_torch(folder: Path) -> None:
    net = network()
    check_export(net, folder / "predictor.onnx")
    with torch.no_grad():
        net.middle.bias.add_(0.1)
    with pytest.raises(UserError, match="differs from torch"):
        check_export(net, folder / "predictor.onnx")


@pytest.mark.parametrize("rows", [1, 2, 7, 300])
def test_any_number_of_rows(folder: Path, rows: int) -> None:
    routing, accepted = Predictor.from_folder(folder).run(
        *(np.zeros((rows, size), np.float32) for size in (HIDDEN, HIDDEN, WIDTH, 4))
    )
    assert routing.shape == (rows, LAYERS, EXPERTS)
    assert accepted.shape == (rows,)
