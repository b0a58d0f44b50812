"""From prompts to scored responses: one call of the rollout engine and one of the reward.

The responses stay with the workers that made them; what comes here is one number per response.

Legend: B responses (prompts x group size).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rljob_trainer.batch.proto import DataProto
from rljob_trainer.batch.ragged import RaggedColumn
from rljob_trainer.controller.stop_request import StepAbandonedError, StopRequest
from rljob_trainer.datasets.prompts import PromptRow
from rljob_trainer.engines.rollout.base import SamplingSettings
from rljob_trainer.errors import RewardError
from rljob_trainer.groups.object_store import stored
from rljob_trainer.observability.metrics import (
    PROMPT_LENGTH_MEAN,
    RESPONSE_CLIP_RATIO,
    RESPONSE_LENGTH_PREFIX,
    REWARD_ERROR_RATE,
    REWARD_PREFIX,
    REWARD_TIMEOUT_RATE,
    spread,
)
from rljob_trainer.observability.samples import Sample, SampleKind
from rljob_trainer.observability.timing import PhaseTimer
from rljob_trainer.workers.columns import (
    ANSWERS,
    DATASET_ROWS,
    IS_REWARD_ERROR,
    IS_REWARD_TIMEOUT,
    IS_TRUNCATED,
    PROMPT_TEXTS,
    PROMPT_TOKEN_IDS,
    RESPONSE_LENGTHS,
    RESPONSE_TEXTS,
    SAMPLE_SEEDS,
    SCORES,
)
from rljob_trainer.workers.protocols import HybridGroup, RewardGroup

MAX_SEED = 2**31
REWARD_COLUMNS = (PROMPT_TEXTS, ANSWERS, DATASET_ROWS)


@dataclass(frozen=True)
class ScoredRollout:
    """Responses and what they are worth; row i of every part belongs together."""

    prompts: tuple[PromptRow, ...]
    batch: DataProto
    """Columns of a rollout and of its scores (see workers/columns); those with one number per response are here."""

    @property
    def rewards_B(self) -> torch.Tensor:
        """[B] float32: the scores."""
        return self.batch[SCORES].float()

    @property
    def lengths_B(self) -> torch.Tensor:
        """[B] int64: tokens of prompt and response."""
        prompts_B = torch.tensor([len(prompt.token_ids) for prompt in self.prompts], dtype=torch.int64)
        return prompts_B + self.batch[RESPONSE_LENGTHS]

    def metrics(self) -> dict[str, float]:
        """Rewards, lengths and failures of the reward."""
        num_rows = len(self.prompts)
        return {
            **spread(REWARD_PREFIX, self.rewards_B.tolist()),
            **spread(RESPONSE_LENGTH_PREFIX, self.batch[RESPONSE_LENGTHS].double().tolist()),
            RESPONSE_CLIP_RATIO: float(self.batch[IS_TRUNCATED].float().mean()),
            PROMPT_LENGTH_MEAN: sum(len(prompt.token_ids) for prompt in self.prompts) / num_rows,
            REWARD_ERROR_RATE: float(self.batch[IS_REWARD_ERROR].sum()) / num_rows,
            REWARD_TIMEOUT_RATE: float(self.batch[IS_REWARD_TIMEOUT].sum()) / num_rows,
        }

    def num_tokens(self) -> int:
        """Prompt and response tokens."""
        return int(self.lengths_B.sum())


class RolloutPhase:
    """Generates and scores."""

    def __init__(self, hybrid: HybridGroup, reward: RewardGroup, timer: PhaseTimer, stop: StopRequest) -> None:
        self.hybrid = hybrid
        self.reward = reward
        self.timer = timer
        self.stop = stop

    def run(
        self,
        prompts: Sequence[PromptRow],
        num_responses: int,
        sampling: SamplingSettings,
        seeds: torch.Tensor,
        *,
        syncs: bool = True,
    ) -> ScoredRollout:
        """So many responses to each prompt, those of one prompt side by side, by the present weights, or where it does
        not sync by those that the rollout engine has. `seeds` is [B] int64.

        Raises RewardError when the reward fails and the job says so, StepAbandonedError when a stop was asked for
        meanwhile."""
        asked = stored(prompt_batch(prompts)).repeat(num_responses)
        request = asked.only([PROMPT_TOKEN_IDS]).with_columns({SAMPLE_SEEDS: seeds})
        with self.timer.phase("rollout"):
            batch = self.hybrid.generate_sequences(request, sampling, syncs)
        with self.timer.phase("reward"):
            scores = self._score(batch.only([RESPONSE_TEXTS]).union(asked.only(REWARD_COLUMNS)))
        repeated = tuple(prompt for prompt in prompts for _ in range(num_responses))
        return ScoredRollout(repeated, batch.union(scores))

    def samples(
        self, rollout: ScoredRollout, step: int, kind: SampleKind, max_samples: int | None = None
    ) -> list[Sample]:
        """One sample per response, or of the first ones. A worker picks their texts out; the others stay there."""
        prompts = rollout.prompts[:max_samples]
        picked = self.reward.response_texts(rollout.batch.slice(0, len(prompts)).only([RESPONSE_TEXTS]))
        scores = rollout.batch[SCORES].tolist()[: len(prompts)]
        return [
            Sample(step, kind, prompt.prompt, str(text), str(prompt.answer), score)
            for prompt, text, score in zip(prompts, picked.object_column(RESPONSE_TEXTS), scores, strict=True)
        ]

    def _score(self, responses: DataProto) -> DataProto:
        """Scores are not trusted once a stop was asked for: what the reward has started may have been signalled."""
        try:
            scores = self.reward.compute_scores(responses)
        except RewardError as error:
            if self.stop.is_requested:
                raise StepAbandonedError from error
            raise
        if self.stop.is_requested:
            raise StepAbandonedError
        return scores


def prompt_batch(prompts: Sequence[PromptRow]) -> DataProto:
    """What workers need of the prompts."""
    return DataProto(
        ragged={PROMPT_TOKEN_IDS: RaggedColumn.from_rows([row.token_ids for row in prompts], torch.int64)},
        objects={
            PROMPT_TEXTS: tuple(row.prompt for row in prompts),
            ANSWERS: tuple(row.answer for row in prompts),
            DATASET_ROWS: tuple(row.row for row in prompts),
        },
    )


def sample_seeds(job_seed: int, stream: int, step: int, count: int) -> torch.Tensor:
    """[count] int64 seeds that depend on nothing but the arguments, so that a resumed run draws the same ones.

    `stream` keeps training and evaluation apart."""
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([job_seed, stream, step])))
    return torch.from_numpy(generator.integers(0, MAX_SEED, size=count, dtype=np.int64))
