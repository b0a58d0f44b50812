"""Processes that compute on CPUs keep the memory that tensors leave."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from rljob_testing.offload_runs import REPLAY, SAMPLING
from rljob_testing.process_memory import num_new_mebibytes
from rljob_testing.ranks import RankedRun, run_on_ranks
from rljob_testing.replayed_steps import MODEL, replayed_run
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.batch.ragged import RaggedColumn
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.engines.rollout.base import RolloutMemory
from rljob_trainer.engines.rollout.hf_engine import HfEngine, HfSettings
from rljob_trainer.workers import hybrid as hybrid_module
from rljob_trainer.workers.columns import PROMPT_TOKEN_IDS, SAMPLE_SEEDS
from rljob_trainer.workers.hybrid import HybridWorker
from rljob_trainer.workers.rollout import RolloutWorker

SUPPORT = Path(__file__).parents[1] / "support"
IF_ASKED = """
from rljob_testing.process_memory import num_new_mebibytes
from rljob_trainer.engines.host_allocator import keep_freed_memory

print(keep_freed_memory() if {is_asked} else None, num_new_mebibytes())
"""
FEW, MANY = 400, 3_000
"""MiB that come anew in the 4,060 that are written to, where memory is kept and where it is not."""


def printed(program: str, variables: Mapping[str, str] | None = None) -> list[str]:
    """By a process as the C library makes it by default, and as workers are."""
    own = {name: text for name, text in os.environ.items() if not name.startswith("MALLOC_") and "TUNABLES" not in name}
    environment = {**own, "PYTHONPATH": str(SUPPORT), "THP_MEM_ALLOC_ENABLE": "1", **(variables or {})}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_what_was_freed_is_used_again() -> None:
    says, new = printed(IF_ASKED.format(is_asked=True))
    assert says == "True"
    assert int(new) < FEW


def test_by_default_it_comes_anew() -> None:
    _, new_by_default = printed(IF_ASKED.format(is_asked=False))
    assert int(new_by_default) > MANY


@pytest.mark.parametrize(
    "variables",
    [
        {"MALLOC_MMAP_THRESHOLD_": "33554432", "MALLOC_TRIM_THRESHOLD_": "67108864"},
        {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=131072"},
    ],
)
def test_what_the_user_has_set_stays(variables: dict[str, str]) -> None:
    says, new = printed(IF_ASKED.format(is_asked=True), variables)
    assert says == "False"
    assert int(new) > MANY


def test_other_settings_of_the_user_change_nothing() -> None:
    says, new = printed(IF_ASKED.format(is_asked=True), {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"})
    assert says == "True"
    assert int(new) < FEW


def test_what_is_free_can_go_back() -> None:
    program = """
import torch
from rljob_trainer.engines import host_allocator
from rljob_trainer.observability.memory import process_bytes

host_allocator.keep_freed_memory()
blocks = [torch.ones(1 << 20) for _ in range(50)]
full = process_bytes()
del blocks
for available in (None, 100, 99):
    host_allocator.available_host_bytes = lambda: available
    host_allocator.give_back_where_short(100)
    print((full - process_bytes()) >> 20)
"""
    unknown, enough, short = map(int, printed(program))
    assert max(unknown, enough) < 10
    assert short > 180


def reused_by_a_rank(_: WorkerContext) -> int:
    return num_new_mebibytes()


def given_back_by_a_hybrid(context: WorkerContext) -> list[int]:
    """What a hybrid worker of an engine with a cache asks for: 0 stands for all that is free."""
    asked: list[int] = []
    hybrid_module.give_freed_memory_back = lambda: asked.append(0)
    hybrid_module.give_back_where_short = asked.append
    run = replayed_run(REPLAY, context)
    settings = HfSettings(MODEL, context.device, torch.float32, 16)
    rollout = RolloutWorker(context, lambda: CachingEngine(settings), 1)
    hybrid = HybridWorker(context, run.actor, rollout, torch.float32, seed=0)
    prompts = RaggedColumn.from_rows([torch.tensor([5, 6, 7])] * 2)
    batch = DataProto({SAMPLE_SEEDS: torch.arange(2)}, ragged={PROMPT_TOKEN_IDS: prompts})
    hybrid.generate_sequences(batch, SAMPLING, True)
    return asked


class CachingEngine(HfEngine):
    """One that says that it has a cache of 1,000 bytes while it is awake."""

    has_cache = True

    def wake(self, *, weights: bool, kv_cache: bool) -> None:
        """See RolloutEngine.wake."""
        del weights
        self.has_cache = self.has_cache or kv_cache

    def sleep(self) -> None:
        """See RolloutEngine.sleep."""
        self.has_cache = False

    @property
    def memory(self) -> RolloutMemory:
        """See RolloutEngine.memory."""
        return RolloutMemory(super().memory.weights, 1000 if self.has_cache else 0)


def test_workers_on_cpus_keep_it_and_a_cache_has_precedence() -> None:
    runs = [RankedRun(reused_by_a_rank, 1), RankedRun(given_back_by_a_hybrid, 1), RankedRun(given_back_by_a_hybrid, 2)]
    [new], alone, together = run_on_ranks(runs)
    assert isinstance(new, int)
    assert new < FEW
    assert alone == [[0, 1000]]
    # Both are on one node.
    assert together == [[0, 2000]] * 2
