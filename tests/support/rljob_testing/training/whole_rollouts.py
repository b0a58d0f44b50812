"""Generates responses and waits for all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rljob_trainer.batch.proto import DataProto
from rljob_trainer.engines.rollout.base import FinishedSequence, GenerationRequest, SamplingSettings
from rljob_trainer.engines.rollout.loop import EngineLoop
from rljob_trainer.workers.columns import IS_LOST, SAMPLE_IDS
from rljob_trainer.workers.hybrid import HybridWorker

SECONDS = 600.0
"""Longer than any rollout takes."""


def whole_rollout(
    hybrid: HybridWorker, batch: DataProto, sampling: SamplingSettings, *, syncs: bool = True
) -> DataProto:
    """Returns one response per row, in the order of the rows. Collective, as `begin_rollout`."""
    hybrid.begin_rollout(syncs)
    hybrid.submit(batch.with_columns({SAMPLE_IDS: torch.arange(len(batch))}), sampling)
    return in_order(hybrid.take(SECONDS))


def run_to_empty(loop: EngineLoop, requests: Sequence[GenerationRequest]) -> dict[str, FinishedSequence]:
    """Returns the responses to these requests, and to unfinished ones, by their ids."""
    loop.submit(requests)
    return {each.request_id: each for each in loop.take(SECONDS)}


def in_order(taken: DataProto) -> DataProto:
    """The responses in the order of their ids. None of them may have ended with an error of the engine."""
    assert not taken[IS_LOST].any()
    return taken.reorder(taken[SAMPLE_IDS].argsort())
