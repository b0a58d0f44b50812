"""Steps whose micro-batches were planned together for all ranks, and the same steps with ranks that pack alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch

from rljob_api.v1alpha1.algorithm import Algorithm
from rljob_api.v1alpha1.model import Critic
from rljob_testing.training import invariance_runs, step_cases
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.engines.process_group import max_over_all_ranks
from rljob_trainer.engines.train import micro_batching

REPLAY = replace(
    invariance_runs.micro(invariance_runs.REPLAY, 20), algorithm=Algorithm.from_wire({"type": "PPO"}), critic=Critic()
)
"""PPO with a critic. Rows have up to 19 tokens, so updates have several micro-batches."""


@dataclass(frozen=True)
class Runs:
    """The results of one rank."""

    planned: step_cases.Outcome
    alone: step_cases.Outcome
    micro_batches: list[list[list[int]]]
    """By pass of the first run, the planned micro-batches."""
    foreign: list[list[int]] | None
    """What becomes of a plan that fits all ranks except rank 0."""


def both_runs(context: WorkerContext) -> Runs:
    """Runs a step in both ways. Collective."""
    found: list[list[list[int]]] = []
    follow = micro_batching._planned

    def noted(
        numbers_B: torch.Tensor, lengths: Sequence[int], max_tokens: int, largest: Callable[[float], float]
    ) -> list[list[int]] | None:
        planned = follow(numbers_B, lengths, max_tokens, largest)
        if planned is not None:
            found.append(planned)
        return planned

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(micro_batching, "_planned", noted)
        planned = step_cases.one_step(step_cases.Case(REPLAY, context.world_size), context)
        patch.setattr(micro_batching, "_planned", lambda *_: None)
        alone = step_cases.one_step(step_cases.Case(REPLAY, context.world_size), context)
    rows = [5, 4 if context.rank else 20]
    largest = partial(max_over_all_ranks, device=torch.device("cpu"))
    foreign = follow(torch.zeros(2, dtype=torch.int32), rows, 20, largest)
    return Runs(planned, alone, found, foreign)
