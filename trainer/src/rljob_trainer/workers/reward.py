"""The reward, where the responses are: every worker process has scoring processes of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from rljob_api.v1alpha1.reward import Reward
from rljob_trainer.batch.proto import DataProto
from rljob_trainer.dispatch.modes import Dispatch
from rljob_trainer.dispatch.register import register
from rljob_trainer.dispatch.worker import Worker, WorkerContext
from rljob_trainer.errors import RewardError
from rljob_trainer.rewards.base import RewardRequest, RewardStatus, ScorerSpec
from rljob_trainer.rewards.error_policy import settle
from rljob_trainer.rewards.process_pool import ScorerPool
from rljob_trainer.workers.columns import (
    ANSWERS,
    DATASET_ROWS,
    IS_REWARD_ERROR,
    IS_REWARD_TIMEOUT,
    PROMPT_TEXTS,
    RESPONSE_TEXTS,
    SCORES,
)


@dataclass(frozen=True)
class RewardSettings:
    """What a reward worker is built from. `num_processes` are those of one worker process."""

    spec: Reward
    scorer: ScorerSpec
    num_processes: int
    log_folder: Path
    environment: Mapping[str, str]


class RewardWorker(Worker):
    """Scores this rank's responses. Its processes load the scorer while the roles after it are built."""

    def __init__(self, context: WorkerContext, settings: RewardSettings) -> None:
        super().__init__(context)
        self.settings = settings
        self.pool = ScorerPool(
            settings.scorer,
            num_processes=settings.num_processes,
            first_number=context.rank * settings.num_processes,
            timeout_seconds=settings.spec.timeout_seconds,
            log_folder=settings.log_folder,
            environment=settings.environment,
        )

    @register(Dispatch.DP_COMPUTE_PROTO)
    def compute_scores(self, batch: DataProto) -> DataProto:
        """SCORES, IS_REWARD_ERROR and IS_REWARD_TIMEOUT of RESPONSE_TEXTS; needs PROMPT_TEXTS, ANSWERS, DATASET_ROWS.

        Raises RewardError when the reward fails and the job says so."""
        columns = [batch.object_column(name) for name in (PROMPT_TEXTS, RESPONSE_TEXTS, ANSWERS, DATASET_ROWS)]
        requests = [
            RewardRequest(str(prompt), str(response), answer, _mapping(row))
            for prompt, response, answer, row in zip(*columns, strict=True)
        ]
        outcomes = self.pool.submit(requests).result()
        scores = settle(self.settings.spec, self.settings.scorer.name, requests, outcomes)
        return DataProto(
            {
                SCORES: torch.tensor(scores.scores, dtype=torch.float64),
                IS_REWARD_ERROR: torch.tensor([outcome.status is RewardStatus.ERROR for outcome in outcomes]),
                IS_REWARD_TIMEOUT: torch.tensor([outcome.status is RewardStatus.TIMEOUT for outcome in outcomes]),
            }
        )

    @register(Dispatch.RANK_ZERO)
    def response_texts(self, batch: DataProto) -> DataProto:
        """RESPONSE_TEXTS of these rows alone, for whoever wants to read some of many."""
        return DataProto(objects={RESPONSE_TEXTS: batch.object_column(RESPONSE_TEXTS)})


def _mapping(row: object) -> Mapping[str, object]:
    if not isinstance(row, Mapping):
        raise RewardError(f"a dataset row must be a mapping (seen: {type(row).__name__})")
    return row
