"""Moving weights to huge pages changes neither their values nor their address; small or strided tensors stay."""

from __future__ import annotations

import torch

from ecospec_kernels.pages import HUGE_PAGE, use_huge_pages
from ecospec_runtime.weights import own_memory

from .cases import random


def test_values_and_address_stay() -> None:
    weight = random(1, 3 * HUGE_PAGE // 4 + 5)
    copy, address = weight.clone(), weight.data_ptr()
    assert use_huge_pages(weight) in (True, False)  # whether the system has huge pages to give is its own affair
    assert torch.equal(weight, copy) and weight.data_ptr() == address


def test_weights_as_they_are_read_can_move_as_well() -> None:
    ours, mallocs = own_memory((4 * HUGE_PAGE,), torch.uint8), torch.empty(4 * HUGE_PAGE, dtype=torch.uint8)
    assert use_huge_pages(ours.fill_(1)) == use_huge_pages(mallocs.fill_(1))


def test_tensors_without_a_whole_page_stay() -> None:
    assert not use_huge_pages(random(1, 1000))
    assert not use_huge_pages(torch.empty(0))
    assert not use_huge_pages(random(1, 1000, 2000)[:, :7])
    assert not use_huge_pages(torch.empty(HUGE_PAGE, device="meta"))
