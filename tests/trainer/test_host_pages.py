"""Pages of the host that are given back, as those of vLLM's KV cache on CPUs."""

from __future__ import annotations

import torch

from rljob_trainer.engines.rollout.host_pages import release_pages
from rljob_trainer.observability.memory import MEBIBYTE, process_bytes

NUM_BYTES = 64 * MEBIBYTE


def test_memory_goes_and_comes_back_as_zeros() -> None:
    tensor = torch.full((NUM_BYTES,), 7, dtype=torch.uint8)
    before = process_bytes()
    release_pages([tensor.untyped_storage()])
    assert before - process_bytes() > NUM_BYTES * 9 // 10
    # The bytes beside whole pages stay.
    assert int(tensor.count_nonzero()) < 2 * 4096
    tensor.fill_(3)
    assert int(tensor[NUM_BYTES // 2]) == 3


def test_less_than_a_page_stays() -> None:
    tensor = torch.full((100,), 7, dtype=torch.uint8)
    release_pages([tensor.untyped_storage()])
    assert tensor.tolist() == [7] * 100
