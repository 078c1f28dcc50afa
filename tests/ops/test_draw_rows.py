"""`draw_rows`: the host's Gumbel draw, its bits exactly, its tokens wherever float32 can tell them apart."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
pytest.importorskip("numba")
import numba
import triton
import triton.language as tl

from ecospec_kernels import dispatch
from ecospec_kernels.argmax_rows.reference import argmax_rows
from ecospec_kernels.draw_rows import cpu, fused, reference
from ecospec_runtime.config import GenerationConfig
from ecospec_runtime.drafters.base import shared_noise
from ecospec_runtime.sampling import Draws, Sampler
from tests.ops.cases import BF16, FP16, FP32, poisoned, random

OPS = (reference, fused)
SEEDS = [0, 3, 2**31, 2**63 - 1]
POSITIONS = [0, 1, 77, 2**31, 2**40]


def int64(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def arguments(logits: Tensor, seed: int = 3, temperature: float = 0.7, first: int = 5) -> tuple[Tensor, ...]:
    """Rows of consecutive positions."""
    return logits, torch.arange(first, first + len(logits)), int64(seed), torch.tensor([temperature])


def assert_hosts_draw(case: tuple[Tensor, ...]) -> None:
    """The host's token of each row, or one whose sum is as large within what float32 and two logs allow.

    A sum has the error of its noise (`noise_error`) times the temperature, and two roundings to float32, of the product and the
    sum, each by 2^-24 of it.
    """
    logits, positions, seed, temperature = case
    words = seed.numpy().view(np.uint64)
    noise = np.stack([cpu.noise(int(words[0]), int(p), logits.size(1), 1.0) for p in positions])
    noise = torch.from_numpy(noise)
    sums = logits.double() + (noise * temperature).double()
    bound = temperature * reference.noise_error(noise) + 2.0**-24 * (sums.abs() + (noise * temperature).abs())
    for op in OPS:
        got = poisoned(op.draw_rows, *case)
        assert got.dtype == torch.int64 and got.shape == logits.shape[:1]
        drawn = sums.argmax(-1)
        for row in (got != drawn).nonzero().flatten().tolist():
            one, other = int(got[row]), int(drawn[row])
            assert sums[row, other] - sums[row, one] <= bound[row, one] + bound[row, other], (row, one, other)


def splitmix_bits(seed: int, position: int, count: int) -> list[int]:
    """SplitMix64 in Python's integers, as Steele et al. (2014) print it, started anew at a mix of seed and position."""

    def mix(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    start = mix((mix(seed) + position) % 2**64)
    return [mix((start + i * 0x9E3779B97F4A7C15) % 2**64) >> 41 for i in range(count)]


@triton.jit
def store_bits(start, out, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.arange(0, BLOCK)
    bits = fused.noise_bits(tl.load(start).to(tl.uint64), place)
    tl.store(out + place, bits, mask=place < count)


@pytest.mark.parametrize("seed", [*SEEDS, 2**64 - 1])
def test_the_bits_are_the_hosts(seed: int) -> None:
    """Above 2^63 an int64 tensor holds the seed's 64 bits."""
    bits = reference.noise_bits(int64(*POSITIONS), int64(reference.signed(seed)), torch.arange(999))
    for row, position in zip(bits, POSITIONS, strict=True):
        expected = splitmix_bits(seed, position, 999)
        assert row.tolist() == expected
        start = reference._mix(reference._mix(int64(reference.signed(seed))) + position)
        out = torch.full((999,), -1, dtype=torch.int32)
        store_bits[(1,)](start, out, 999, BLOCK=1024)
        assert out.tolist() == expected
    assert bits.min() >= 0 and bits.max() < 2**23 and len(bits.unique()) > 4900


@pytest.mark.parametrize("seed", [*SEEDS, 2**64 - 1])
def test_the_hosts_noise_is_that_of_the_bits(seed: int) -> None:
    """Of any length, whatever vectors it is made in; off by 2 units in the last place of each log at most."""
    for position in POSITIONS:
        whole = cpu.noise(seed, position, 999, 0.7)
        for count in (1, 7, 64, 998):
            assert (cpu.noise(seed, position, count, 0.7) == whole[:count]).all()
        exact = -np.log(-np.log((np.array(splitmix_bits(seed, position, 999)) + 0.5) * 2.0**-23))
        allowed = 0.7 * reference.noise_error(torch.from_numpy(exact)).numpy()
        for found in (whole, reference.noise(seed, position, 999, 0.7)):
            assert found.dtype == np.float32 and (np.abs(found - 0.7 * exact) <= allowed / 2).all()


def test_noise_of_every_bit_pattern_is_within_the_bound() -> None:
    """All 2^23: torch's and, by the kernel's own log, the host's against that in float64."""
    bits = torch.arange(2**23)
    exact = -torch.log(-torch.log((bits.double() + 0.5) * 2.0**-23))
    allowed = reference.noise_error(exact)
    uniform = (bits.float() + 0.5) * 2.0**-23
    host = torch.empty_like(uniform)
    noise_of_uniform(uniform.numpy(), host.numpy())
    for found in (reference.gumbels(bits), host):
        assert found.isfinite().all() and ((found - exact).abs() <= allowed / 2).all()


@numba.njit
def noise_of_uniform(uniform, out):  # type: ignore[no-untyped-def]
    for i in range(len(uniform)):
        out[i] = -cpu.log(-cpu.log(uniform[i]))


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 1), (65, 63), (3, fused.PIECE + 5), (2, 3 * fused.PIECE)])
def test_draws_are_the_hosts(dtype: torch.dtype, rows: int, vocabulary: int) -> None:
    """In rows further apart than they are long; half of the tokens are cut off."""
    logits = random(1, rows, vocabulary + 3, scale=3.0).to(dtype)[:, :vocabulary]
    assert_hosts_draw(arguments(logits, seed=2**63 - 1, first=2**33))
    logits[:, 1::2] = -math.inf
    assert_hosts_draw(arguments(logits, temperature=1.5))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_sampler_chooses_the_same(seed: int) -> None:
    """The engine's own rows: filtered by top-p, at the position that the token gets."""
    logits = random(seed % 97, 20, 200, scale=4.0)
    sampler = Sampler(GenerationConfig(max_new_tokens=1, temperature=0.8, top_p=0.9, seed=seed))
    probabilities = np.stack([sampler.probabilities(row) for row in logits.numpy()])
    case = arguments(logits.masked_fill(torch.from_numpy(probabilities == 0), -math.inf), seed, 0.8)
    expected = [sampler.choose(row, 5 + i, set()) for i, row in enumerate(logits.numpy())]
    assert len(set(expected)) > 10
    for op in OPS:
        assert op.draw_rows(*case).tolist() == expected


def test_draws_follow_the_distribution() -> None:
    """Chi-squared of 4000 positions over 6 tokens, below the 0.999 quantile for 5 degrees of freedom."""
    logits = torch.tensor([[1.0, 0.0, -1.0, 0.5, 2.0, -0.5]])
    expected = (logits / 0.7).softmax(-1)[0] * 4000
    drawn = reference.draw_rows(*arguments(logits.expand(4000, -1), seed=11))
    counts = torch.bincount(drawn, minlength=6)
    assert float(((counts - expected) ** 2 / expected).sum()) < 20.5


def test_odd_logits_are_as_in_argmax() -> None:
    logits = random(1, 5, 70)
    logits[0] = -math.inf
    logits[1, 40] = math.nan
    logits[2, 50:] = math.inf
    logits[3], logits[3, 69] = -math.inf, -1e4
    for op in OPS:
        assert op.draw_rows(*arguments(logits)).tolist()[:4] == [0, 40, 50, 69]


def test_a_replay_reads_seed_temperature_and_positions_anew() -> None:
    logits, positions, seed, temperature = arguments(torch.zeros(40, 50))
    for op in OPS:
        first = op.draw_rows(logits, positions, seed, temperature)
        assert torch.equal(first[1:], op.draw_rows(logits, positions + 1, seed, temperature)[:-1])
        assert (op.draw_rows(logits, positions, seed + 1, temperature) != first).sum() > 30
        peaked = random(2, 40, 50)
        assert torch.equal(op.draw_rows(peaked, positions, seed, 0 * temperature), argmax_rows(peaked))


def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that is a position late, one with a neighbour's seed, one without noise."""
    kernel = fused.draw_kernel
    for at, change in ((1, lambda t: t + 1), (2, lambda t: t + 1), (3, lambda t: 0 * t)):
        launch: Any = lambda grid, i=at, c=change: lambda *a, **k: kernel[grid](*a[:i], c(a[i]), *a[i + 1 :], **k)  # noqa: E731
        monkeypatch.setattr(fused, "draw_kernel", type("Wrong", (), {"__getitem__": lambda _, g, w=launch: w(g)})())
        with pytest.raises(AssertionError):
            assert_hosts_draw(arguments(random(1, 9, 50)))


def test_bad_arguments_are_refused_before_a_launch() -> None:
    logits, positions, seed, temperature = arguments(random(1, 3, 4))
    cases = [
        ("logits of shape", (logits.mT, positions, seed, temperature)),
        ("logits are torch.float64", (logits.double(), positions, seed, temperature)),
        (r"positions has shape \[2\], not \[3\]", (logits, positions[:2], seed, temperature)),
        ("positions is int32, not int64", (logits, positions.int(), seed, temperature)),
        (r"seed has shape \[\], not \[1\]", (logits, positions, seed[0], temperature)),
        ("temperature is float64, not float32", (logits, positions, seed, temperature.double())),
        ("temperature lies on meta", (logits, positions, seed, temperature.to("meta"))),
    ]
    for message, case in cases:
        for op in OPS:
            with pytest.raises(ValueError, match=f"draw_rows: .*{message}"):
                op.draw_rows(*case)


@torch.no_grad()
def test_dispatch_knows_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    case, found = arguments(random(1, 3, 40)), []
    for implementation in ("fused", "reference"):
        monkeypatch.setattr(dispatch, "runs_triton", lambda t, fused=implementation == "fused": fused)
        before = dispatch.CALLS["draw_rows", implementation]
        found.append(dispatch.draw_rows(*case))
        assert dispatch.CALLS["draw_rows", implementation] == before + 1
    assert torch.equal(*found)


def test_a_drafter_adds_the_draws_noise() -> None:
    """`Draws.noise` is the `Sampler`'s, of any ids; and what `Draws` chooses from zeros is its argmax."""
    sampler, draws = Sampler(GenerationConfig(temperature=0.7, seed=2**63 - 1)), Draws(2**63 - 1, 0.7, "cpu")
    ids, positions = torch.tensor([5, 0, 999, 31]), int64(*POSITIONS)
    found = draws.noise(positions, ids)
    for row, position in zip(found, POSITIONS, strict=True):
        torch.testing.assert_close(row, torch.from_numpy(sampler.noise(position, 1000))[ids], rtol=1e-5, atol=1e-5)
    every = draws.noise(positions, torch.arange(1000))
    assert draws(torch.zeros(len(POSITIONS), 1000), positions).tolist() == every.argmax(-1).tolist()
    assert sampler.draws(torch.device("cpu")) is sampler.draws(torch.device("cpu"))


def test_noise_is_made_where_the_drafter_is() -> None:
    """Of the places after row 8: on the host, and on a device as that device's draws make it."""
    sampler, ids = Sampler(GenerationConfig(temperature=0.7, seed=3)), np.array([5, 0, 999, 31])
    host, device = (shared_noise(sampler, 8, 2, ids, torch.device(kind)) for kind in ("cpu", "meta"))
    assert host is not None and device is not None
    assert (device.device.type, device.shape, device.dtype) == ("meta", host.shape, host.dtype)
    expected = Draws(3, 0.7, "cpu").noise(torch.arange(9, 12), torch.from_numpy(ids))
    torch.testing.assert_close(host, expected, rtol=1e-5, atol=1e-5)
