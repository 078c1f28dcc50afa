"""`expert_predictor`: the sets that the host makes of the same logits, ties and garbage included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

pytest.importorskip("triton")

from ecospec_kernels import dispatch
from ecospec_kernels.bitsets import pack, unpack
from ecospec_kernels.expert_predictor import fused, reference
from ecospec_runtime.predictor import WEIGHTS_FILE, PredictorShapes, open_session, predicted_masks, shrink
from ecospec_train.predictor_export import INPUTS, example, export_network
from ecospec_train.predictor_model import PredictorNetwork
from tests.ops.cases import poisoned, random

Case = tuple[Tensor, Tensor, Tensor]
OPS = (reference, fused)
pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, where logits are infinite


def whole(n: int, layers: int, experts: int, width: int) -> Case:
    """Small whole numbers: every sum is exact in whatever order, so logits are the same everywhere, and many tie."""
    shapes = (n, width), (layers, experts, width), (layers, experts)
    return tuple(random(i, *shape).round() for i, shape in enumerate(shapes))  # type: ignore[return-value]


def hosts_logits(case: Case, share: float = 0.0) -> np.ndarray:
    """What the network would say, shrunk as the host does it."""
    logits = torch.einsum("nw,lew->nle", *case[:2]).add(case[2]).numpy()
    shrink(logits, share)
    return logits


def as_words(masks: list[int], layers: int, experts: int) -> Tensor:
    """The host's bit sets as the op gives them."""
    bits = [[(mask >> b) & 1 for b in range(layers * experts)] for mask in masks]
    return pack(torch.tensor(bits, dtype=torch.bool).view(-1, layers, experts))


def assert_hosts_sets(case: Case, top_k: int, share: float = 0.0) -> None:
    """Both implementations give the host's sets exactly; for cases whose logits are exact."""
    with np.errstate(invalid="ignore"):
        expected = as_words(predicted_masks(hosts_logits(case, share), top_k), *case[2].shape)
    for op in OPS:
        got = poisoned(op.expert_predictor, *case, top_k, share)
        assert got.dtype == torch.int32 and torch.equal(got, expected)


def assert_nearly_top_k(masks: Tensor, case: Case, top_k: int) -> None:
    """Sets of `top_k` experts that are the largest of logits which differ from the exact ones by rounding alone.

    fp32 sums of m products in any order are off by at most m u times the sum of their magnitudes, u = 2^-24 (Higham, 2002,
    section 3.1, to first order; m + 1 for the bias). So no expert outside has an exact logit above one inside
    by more than both bounds.
    """
    hidden, head, bias = (t.double() for t in case)
    exact = torch.einsum("nw,lew->nle", hidden, head) + bias
    size = torch.einsum("nw,lew->nle", hidden.abs(), head.abs()) + bias.abs()
    bound = (hidden.size(1) + 1) * 2.0**-24 * size
    inside = unpack(masks)[..., : bias.size(1)]
    assert (inside.sum(-1) == top_k).all() and torch.equal(pack(inside), masks)
    lowest = (exact + bound).masked_fill(~inside, torch.inf).amin(-1)
    highest = (exact - bound).masked_fill(inside, -torch.inf).amax(-1)
    assert (lowest >= highest).all()


SIZES = [(1, 1, 6, 16, 1), (3, 5, 60, 48, 6), (63, 2, 128, 40, 8), (65, 1, 256, 192, 10), (2, 94, 33, 16, 4), (17, 1, 512, 32, 10)]  # fmt: skip


@pytest.mark.parametrize(("n", "layers", "experts", "width", "top_k"), SIZES)
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_sets_of_tied_logits_are_the_hosts(n: int, layers: int, experts: int, width: int, top_k: int, share: float) -> None:  # fmt: skip
    case = whole(n, layers, experts, width)
    assert_hosts_sets(case, top_k, share)
    logits = np.sort(hosts_logits(case, share), -1)
    assert n == 1 or (logits[..., -top_k] == logits[..., -top_k - 1]).any()  # else nothing was tied


@pytest.mark.parametrize(("n", "layers", "experts", "width", "top_k"), [*SIZES, (2, 1, 40, 1024, 8)])
def test_sets_of_any_numbers_are_the_largest(n: int, layers: int, experts: int, width: int, top_k: int) -> None:
    case = random(1, n, width), random(2, layers, experts, width), random(3, layers, experts)
    for op in OPS:
        assert_nearly_top_k(poisoned(op.expert_predictor, *case, top_k), case, top_k)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("row", [0, 1, 5])
def test_an_unknown_row_gets_experts_of_its_own(value: float, row: int) -> None:
    """And leaves the others alone: the first two, which all rows lean on, included."""
    case = whole(20, 3, 12, 16)
    case[0][row, 3] = value
    for share in (0.0, 0.5):
        assert_hosts_sets(case, 5, share)
    uniform = fused.expert_predictor(*case, 5, 0.5, "probabilities")
    assert torch.allclose(uniform[row], torch.tensor(5 / 12)) and uniform.isfinite().all()


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("value", [2.0**126, 2.0**127, -(2.0**127)])
def test_a_mean_of_numbers_as_large_as_float32_has_is_a_number(value: float, rows: int) -> None:
    """Although the first two rows' sum is none. Weights are as small: every logit is exact."""
    case = hidden, head, bias = whole(rows, 3, 12, 16)
    hidden[:, 3] = value * torch.tensor([1, 1, -0.5])[:rows]
    head[..., 3] += 1
    head *= 2.0**-126 * (torch.arange(16) == 3)
    assert_hosts_sets(case, 5, 0.5)
    exact = torch.einsum("nw,lew->nle", hidden.double(), head.double()) + bias
    for op in OPS:
        assert torch.equal(op.expert_predictor(*case, 5, 0.5, "logits"), (exact + 0.5 * exact[:2].mean(0)).float())


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_an_unknown_layer_is_unknown_in_every_row(value: float) -> None:
    case = whole(20, 3, 12, 16)
    case[2][1, 11] = value
    assert_hosts_sets(case, 5)
    case[1][0, 4, 2] = value
    assert_hosts_sets(case, 5)


def test_signs_of_zero_tie() -> None:
    case = torch.ones(2, 16), torch.zeros(1, 40, 16), torch.zeros(1, 40)
    case[2][0, ::2] = -0.0
    assert_hosts_sets(case, 7)


@pytest.mark.parametrize("experts", [6, 60, 128])
def test_probabilities_and_logits(experts: int) -> None:
    """Against the mathematics in float64; also where every sigmoid underflows.

    Both are sums of `width` products, and exp and log add a few units in the last place: 1e-5 of logits near 10.
    """
    case = random(1, 19, 64), random(2, 2, experts, 64), random(3, 2, experts)
    case[0][7] = 0.0
    case[2][1] -= 120.0  # row 7 of layer 1: sigmoids of -120
    exact = torch.einsum("nw,lew->nle", case[0].double(), case[1].double()) + case[2].double()
    exact += 0.25 * exact[:2].mean(0)
    share = torch.nn.functional.logsigmoid(exact).softmax(-1) * 4
    for op in OPS:
        logits = poisoned(op.expert_predictor, *case, 4, 0.25, "logits")
        probabilities = poisoned(op.expert_predictor, *case, 4, 0.25, "probabilities")
        torch.testing.assert_close(logits, exact.float(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(probabilities, share.float(), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(probabilities.sum(-1), torch.full((19, 2), 4.0))
    assert torch.allclose(share[:, 0], exact[:, 0].sigmoid() * (4 / exact[:, 0].sigmoid().sum(-1, keepdim=True)))


def test_a_fitted_network_and_its_export_give_the_same_sets(tmp_path: Path) -> None:
    """From the files of a predictor folder: onnxruntime and the host's masks against the op on the trunk's output."""
    torch.manual_seed(0)
    shapes = PredictorShapes(hidden=32, state=24, layers=3, experts=40, top_k=5)
    network = PredictorNetwork(shapes, 48).eval()
    export_network(network, tmp_path)
    weights = load_file(tmp_path / WEIGHTS_FILE)
    inputs, seen = example(network, 33), []
    network.routing.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    with torch.inference_mode():
        network(*inputs)
    case = (
        seen[0], weights["routing.weight"].unflatten(0, (3, 40)), weights["routing.bias"].unflatten(0, (3, 40)),
    )  # fmt: skip
    feed = {name: value.numpy() for name, value in zip(INPUTS, inputs, strict=True)}
    (logits,) = open_session(tmp_path / "predictor.onnx", 1).run(["routing_logits"], feed)
    shrink(logits, 0.2)
    expected = as_words(predicted_masks(logits, 5), 3, 40)
    gap = np.diff(np.sort(logits, -1)[..., [-6, -5]])[..., 0]
    sure = torch.from_numpy(gap > 1e-5)  # the trunk's own sums differ too: see check_export
    assert sure.float().mean() > 0.95
    for op in OPS:
        assert torch.equal(op.expert_predictor(*case, 5, 0.2)[sure], expected[sure])


def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that drops the last column, one that takes an expert less, one that swaps the layers' biases."""
    kernel, case = fused.predict_kernel, whole(3, 2, 60, 48)
    floats = random(1, 3, 48), random(2, 2, 60, 48), random(3, 2, 60)
    changes: list[Any] = [
        lambda a: (*a[:5], a[5] - 1, *a[6:]),
        lambda a: (*a[:9], a[9] - 1, *a[10:]),
        lambda a: (*a[:2], a[2].flip(0).contiguous(), *a[3:]),
    ]
    for change in changes:
        launch = lambda grid, c=change: lambda *a, **k: kernel[grid](*c(a), **k)  # noqa: E731
        monkeypatch.setattr(fused, "predict_kernel", type("Wrong", (), {"__getitem__": lambda _, g, w=launch: w(g)})())
        with pytest.raises(AssertionError):
            assert_hosts_sets(case, 6)
        with pytest.raises(AssertionError):
            assert_nearly_top_k(fused.expert_predictor(*floats, 6), floats, 6)


def test_bad_arguments_are_refused_before_a_launch() -> None:
    hidden, head, bias = whole(3, 2, 6, 16)
    cases: list[tuple[str, tuple[Any, ...]]] = [
        (r"hidden \[3\] and head", (hidden[:, 0], head, bias, 2)),
        (r"hidden has shape \[3, 15\], not \[\*, 16\]", (hidden[:, :15].contiguous(), head, bias, 2)),
        ("hidden is not contiguous", (hidden.T.contiguous().T, head, bias, 2)),
        ("head is bfloat16, not float32", (hidden, head.bfloat16(), bias, 2)),
        (r"bias has shape \[12\], not \[2, 6\]", (hidden, head, bias.flatten(), 2)),
        ("bias lies on meta", (hidden, head, bias.to("meta"), 2)),
        ("top_k 7 of 6 experts", (hidden, head, bias, 7)),
        ("top_k 0 of 6 experts", (hidden, head, bias, 0)),
        (r"shrinkage 1\.5", (hidden, head, bias, 2, 1.5)),
        ("output 'sets'", (hidden, head, bias, 2, 0.0, "sets")),
    ]
    for message, arguments in cases:
        for op in OPS:
            with pytest.raises(ValueError, match=f"expert_predictor: .*{message}"):
                op.expert_predictor(*arguments)
    for wide in (whole(1, 1, 513, 16), whole(1, 1, 16, 1025)):
        with pytest.raises(ValueError, match="more than 512 experts or a width above 1024"):
            fused.expert_predictor(*wide, 2)


@torch.no_grad()
def test_dispatch_knows_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    case, found = whole(3, 2, 6, 16), []
    for implementation in ("fused", "reference"):
        monkeypatch.setattr(dispatch, "runs_triton", lambda t, fused=implementation == "fused": fused)
        before = dispatch.CALLS["expert_predictor", implementation]
        found.append(dispatch.expert_predictor(*case, 2, 0.5))
        assert dispatch.CALLS["expert_predictor", implementation] == before + 1
    assert torch.equal(*found)
