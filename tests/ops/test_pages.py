"""Moving weights to huge pages changes neither their values nor their address; small or strided tensors stay."""

from __future__ import annotations

import torch

from ecospec_kernels.pages import HUGE_PAGE, use_huge_pages

from .cases import random


def test_values_and_address_stay() -> None:
    weight = random(1, 3 * HUGE_PAGE // 4 + 5)
    copy, address = weight.clone(), weight.data_ptr()
    assert use_huge_pages(weight) in (True, False)  # whether the system has huge pages to give is its own affair
    assert torch.equal(weight, copy) and weight.data_ptr() == address


def test_tensors_without_a_whole_page_stay() -> None:
    assert not use_huge_pages(random(1, 1000))
    assert not use_huge_pages(torch.empty(0))
    assert not use_huge_pages(random(1, 1000, 2000)[:, :7])
    assert not use_huge_pages(torch.empty(HUGE_PAGE, device="meta"))
