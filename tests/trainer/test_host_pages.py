"""Pages of the host that are given back, as those of vLLM's KV cache on CPUs."""

from __future__ import annotations

import mmap
import resource
from collections.abc import Callable, Iterable

import pytest
import torch

from rljob_testing.process_memory import lent_bytes
from rljob_trainer.engines.rollout.host_pages import lend_pages, release_pages
from rljob_trainer.observability.memory import MEBIBYTE, process_bytes

NUM_BYTES = 64 * MEBIBYTE


def test_memory_goes_and_comes_back_as_zeros() -> None:
    tensor = torch.full((NUM_BYTES,), 7, dtype=torch.uint8)
    before = process_bytes()
    release_pages([tensor.untyped_storage()])
    assert before - process_bytes() > NUM_BYTES * 9 // 10
    # The bytes beside whole pages stay.
    assert int(tensor.count_nonzero()) < 2 * mmap.PAGESIZE
    tensor.fill_(3)
    assert int(tensor[NUM_BYTES // 2]) == 3


@pytest.mark.parametrize("let_go", [release_pages, lend_pages])
def test_less_than_a_page_stays(let_go: Callable[[Iterable[torch.UntypedStorage]], None]) -> None:
    tensor = torch.full((100,), 7, dtype=torch.uint8)
    let_go([tensor.untyped_storage()])
    assert tensor.tolist() == [7] * 100


def test_lent_memory_is_the_systems_until_it_is_written_to() -> None:
    tensor = torch.full((NUM_BYTES,), 7, dtype=torch.uint8)
    before = lent_bytes()
    lend_pages([tensor.untyped_storage()])
    assert lent_bytes() - before > NUM_BYTES * 9 // 10
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensor.fill_(3)
    # Most are still there: nobody wanted them.
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults) * mmap.PAGESIZE < NUM_BYTES // 2
    assert lent_bytes() - before < NUM_BYTES // 10
    assert int(tensor.long().sum()) == 3 * NUM_BYTES


def test_where_nothing_can_be_lent_it_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_FREE", 9999)
    tensor = torch.full((NUM_BYTES,), 7, dtype=torch.uint8)
    lend_pages([tensor.untyped_storage()])
    assert int(tensor.count_nonzero()) < 2 * mmap.PAGESIZE
