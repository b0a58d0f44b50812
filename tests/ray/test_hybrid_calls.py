"""Calls of the hybrid on real workers: responses are taken while others are generated, each engine alone, and an engine
that dies or hangs fails its calls."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rljob_testing.ray_clusters import echo_workers, small_hybrids
from rljob_testing.running_clock import RunningClock
from rljob_testing.training.whole_rollouts import in_order
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.batch.ragged import RaggedColumn
from rljob_trainer.engines.rollout.base import SamplingSettings
from rljob_trainer.errors import ResourceError, WorkerError
from rljob_trainer.groups.calls import Pending
from rljob_trainer.groups.worker_group import WorkerGroup, spawn
from rljob_trainer.observability.metrics import TIMING_PREFIX
from rljob_trainer.workers.columns import (
    IS_LOST,
    POLICY_VERSIONS,
    PROMPT_TOKEN_IDS,
    RESPONSE_LENGTHS,
    ROLLOUT_LOGPROBS,
    SAMPLE_IDS,
    SAMPLE_SEEDS,
    SCORES,
    TOKENS,
)
from rljob_trainer.workers.protocols import HybridGroup

pytestmark = [pytest.mark.ray]

SHORT = SamplingSettings(1.0, 1.0, 0, small_hybrids.NUM_FREE_TOKENS, ())
LONG = replace(SHORT, max_new_tokens=12)
PROMPTS = ([4, 9, 5], [12, 7, 3, 8, 4, 6], [3, 3, 7], [5, 5])
SECONDS = 60.0
"""Longer than any test waits."""


class Engines:
    """Two processes with an engine each."""

    def __init__(self, groups: dict[str, WorkerGroup], folder: Path, clock: RunningClock) -> None:
        self.both = groups[small_hybrids.HYBRID].seen_as(HybridGroup)
        self.each = [groups[small_hybrids.HYBRID].sub_group(rank, rank + 1).seen_as(HybridGroup) for rank in range(2)]
        self.scorers = [groups[small_hybrids.SCORER].sub_group(rank, rank + 1) for rank in range(2)]
        self.folders = [folder / str(rank) for rank in range(2)]
        self.clock = clock

    def whole_rollout(self, rows: DataProto) -> DataProto:
        """Short responses to all rows, in their order."""
        self.both.begin_rollout(True)
        self.both.submit(rows.chunk(2), SHORT)
        return in_order(self.both.take(SECONDS))

    def hold(self, *, is_held: bool) -> None:
        """Whether both engines hold long responses."""
        for folder in self.folders:
            if is_held:
                (folder / "hold").touch()
            else:
                (folder / "hold").unlink()


@pytest.fixture
def engines(ray_driver: None, tmp_path: Path) -> Iterator[Engines]:  # noqa: ARG001 - connects
    with small_hybrids.hybrid_processes(tmp_path, 2) as (processes, clock):
        yield Engines(spawn(processes), tmp_path, clock)


def prompts(first_id: int, number: int = 4) -> DataProto:
    return DataProto(
        {
            SAMPLE_SEEDS: torch.arange(number) + first_id % 10,
            SAMPLE_IDS: torch.arange(number) + first_id,
        },
        ragged={
            PROMPT_TOKEN_IDS: RaggedColumn.from_rows(
                [torch.tensor(PROMPTS[row % len(PROMPTS)]) for row in range(number)]
            )
        },
    )


def rows_of(engine: HybridGroup, number: int) -> DataProto:
    """Takes responses until there are that many."""
    found: list[DataProto] = []
    while sum(map(len, found)) < number:
        found.append(engine.take(0.1))
    return DataProto.concat(found)


def assert_same_responses(found: DataProto, expected: DataProto) -> None:
    found, expected = found.fetched(), expected.fetched()
    for name in (TOKENS, POLICY_VERSIONS):
        assert found.ragged_column(name).same_as(expected.ragged_column(name)), name
    # Later requests may be generated in the same pass, and a pass rounds differently with more rows.
    difference = found.ragged_column(ROLLOUT_LOGPROBS).values - expected.ragged_column(ROLLOUT_LOGPROBS).values
    assert difference.abs().max() < 1e-5


def test_responses_are_scored_while_others_are_generated(engines: Engines) -> None:
    drained = engines.whole_rollout(prompts(0))
    engines.hold(is_held=True)
    engines.both.begin_rollout(True)
    for engine, rows in zip(engines.each, prompts(10).chunk(2), strict=True):
        assert len(engine.submit([rows], SHORT)) == 0
        # These wait for the first ones.
        engine.submit([prompts(20 + int(rows[SAMPLE_IDS][0]), 2)], LONG)
    taken = [rows_of(engine, 2) for engine in engines.each]
    assert [each[SAMPLE_IDS].tolist() for each in taken] == [[10, 11], [12, 13]]
    assert_same_responses(DataProto.concat(taken), drained)
    assert not DataProto.concat(taken)[IS_LOST].any()
    # Nothing has ended since. Parts without rows can be joined with others.
    nothing = engines.each[0].take(0.0)
    assert nothing[SAMPLE_IDS].tolist() == []
    assert len(DataProto.concat([nothing, taken[0]])) == 2
    for rows, scorer in zip(taken, engines.scorers, strict=True):
        pending = echo_workers.call(scorer, "score", rows)
        assert isinstance(pending, Pending)
        assert (pending.result()[SCORES] > 0).all()
    engines.hold(is_held=False)
    rest = [engine.take(SECONDS) for engine in engines.each]
    assert [each[SAMPLE_IDS].tolist() for each in rest] == [[30, 31], [32, 33]]
    assert DataProto.concat(rest)[RESPONSE_LENGTHS].tolist() == [LONG.max_new_tokens] * 4
    seconds = engines.both.take_metrics()
    assert seconds[f"{TIMING_PREFIX}generate"] > 0
    assert f"{TIMING_PREFIX}weight_sync" in seconds


def test_an_abandoned_rollout_leaves_nothing_behind(engines: Engines) -> None:
    drained = engines.whole_rollout(prompts(0))
    engines.hold(is_held=True)
    engines.both.begin_rollout(True)
    engines.both.submit(prompts(10).chunk(2), LONG)
    assert len(engines.both.take(0.2)) == 0
    engines.hold(is_held=False)
    engines.both.abort()
    assert len(engines.both.take(SECONDS)) == 0
    assert_same_responses(engines.whole_rollout(prompts(0)), drained)
    # Ids are free again.
    engines.both.begin_rollout(True)
    engines.both.submit(prompts(10).chunk(2), SHORT)
    assert sorted(engines.both.take(SECONDS)[SAMPLE_IDS].tolist()) == [10, 11, 12, 13]


def test_an_engine_that_dies_and_one_that_hangs_fail_their_calls(engines: Engines) -> None:
    dying, hanging = engines.each
    (engines.folders[0] / "fail").touch()
    (engines.folders[1] / "hold").touch()
    engines.both.begin_rollout(True)
    engines.both.submit(prompts(0).chunk(2), LONG)
    with pytest.raises(WorkerError, match=r"hybrid\.take: worker rank 0(?s:.*)in step(?s:.*)the engine is broken"):
        dying.take(SECONDS)
    with pytest.raises(WorkerError, match="the engine is broken"):
        dying.submit([prompts(10, 1)], SHORT)
    assert len(hanging.take(0.0)) == 0
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(hanging.take, 10 * SECONDS)
        engines.clock.advance(small_hybrids.STALL_SECONDS + 1)
        with pytest.raises(ResourceError, match=r"rollout\.stallSeconds: (?s:.*)small_hybrids\.py.* in step"):
            waiting.result(SECONDS)
    with pytest.raises(ResourceError, match=r"rollout\.stallSeconds"):
        hanging.take(0.0)
