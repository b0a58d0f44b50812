"""The rollout worker: the requests that it makes from a batch, and the columns that it returns. With a fake engine."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rljob_testing.training import stub_step
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.batch.ragged import RaggedColumn
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.engines.rollout.base import FinishedSequence, FinishReason, GenerationRequest, SamplingSettings
from rljob_trainer.workers.columns import (
    IS_GREEDY,
    IS_LOST,
    IS_TRUNCATED,
    PROMPT_TOKEN_IDS,
    SAMPLE_IDS,
    SAMPLE_SEEDS,
)
from rljob_trainer.workers.rollout import RolloutWorker


class FakeEngine:
    """All requests end in one step, with this reason."""

    memory = None

    def __init__(self, reason: FinishReason = FinishReason.STOP) -> None:
        self.reason = reason
        self.requests: list[GenerationRequest] = []
        self.is_done = True

    def clear_cache(self) -> None: ...

    def add(self, request: GenerationRequest) -> None:
        self.requests.append(request)
        self.is_done = False

    def has_unfinished(self) -> bool:
        return not self.is_done

    def step(self) -> list[FinishedSequence]:
        self.is_done = True
        return [replace(stub_step.finished(each.request_id, 1), finish_reason=self.reason) for each in self.requests]

    def worker(self) -> RolloutWorker:
        context = WorkerContext(0, 1, 0, 0, "", 0, "cpu", 1)
        return RolloutWorker(context, lambda: self, 1)  # type: ignore[arg-type,return-value]


TWO_ROWS = DataProto(
    {
        SAMPLE_SEEDS: torch.tensor([3, 0]),
        IS_GREEDY: torch.tensor([False, True]),
        SAMPLE_IDS: torch.tensor([40, 50]),
    },
    ragged={PROMPT_TOKEN_IDS: RaggedColumn.from_rows([[1], [1]], torch.int64)},
)


def test_the_generator_is_greedy_in_the_marked_rows() -> None:
    engine = FakeEngine()
    worker = engine.worker()
    worker.submit(TWO_ROWS, stub_step.SAMPLING)
    assert worker.take(60.0)[SAMPLE_IDS].tolist() == [40, 50]
    assert [each.sampling for each in engine.requests] == [
        stub_step.SAMPLING,
        SamplingSettings(0.0, 1.0, 0, 8, ("stop",)),
    ]
    assert [each.seed for each in engine.requests] == [3, 0]


@pytest.mark.parametrize("reason", FinishReason)
def test_responses_that_the_engine_did_not_complete_are_marked(reason: FinishReason) -> None:
    is_wrong = reason in (FinishReason.ERROR, FinishReason.ABORTED)
    worker = FakeEngine(reason).worker()
    worker.submit(TWO_ROWS, stub_step.SAMPLING)
    taken = worker.take(60.0)
    assert taken[IS_LOST].tolist() == [is_wrong] * 2
    assert taken[IS_TRUNCATED].tolist() == [reason is FinishReason.LENGTH] * 2
