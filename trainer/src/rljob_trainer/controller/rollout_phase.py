"""From prompts to scored responses: one call of the rollout engine and one of the reward.

Legend: B responses (prompts x group size), T tokens of prompt and response.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rljob_api.v1alpha1.reward import Reward
from rljob_trainer.controller.stop_request import StepAbandonedError, StopRequest
from rljob_trainer.data.prompts import PromptRow
from rljob_trainer.data.proto import DataProto
from rljob_trainer.engines.rollout.base import SamplingSettings
from rljob_trainer.errors import RewardError
from rljob_trainer.observability.metrics import (
    PROMPT_LENGTH_MEAN,
    RESPONSE_CLIP_RATIO,
    REWARD_ERROR_RATE,
    REWARD_TIMEOUT_RATE,
    spread,
)
from rljob_trainer.observability.timing import PhaseTimer
from rljob_trainer.rewards.base import RewardRequest
from rljob_trainer.rewards.policy import Scores, settle
from rljob_trainer.rewards.process_pool import ScorerPool
from rljob_trainer.workers.columns import (
    IS_TRUNCATED,
    PROMPT_TOKEN_IDS,
    RESPONSE_MASK,
    RESPONSE_TEXTS,
    SAMPLE_SEEDS,
)
from rljob_trainer.workers.protocols import HybridGroup

MAX_SEED = 2**31


@dataclass(frozen=True)
class ScoredRollout:
    """Responses and what they are worth; row i of every part belongs together."""

    prompts: tuple[PromptRow, ...]
    batch: DataProto
    """Columns of a rollout (see workers/columns), [B, T]."""
    responses: tuple[str, ...]
    scores: Scores
    rewards_B: torch.Tensor

    def metrics(self) -> dict[str, float]:
        """Rewards, lengths and failures of the reward."""
        lengths = [float(length) for length in self.batch[RESPONSE_MASK].sum(dim=1).tolist()]
        num_rows = len(self.prompts)
        return {
            **spread("critic/rewards", self.rewards_B.tolist()),
            **spread("response_length", lengths),
            RESPONSE_CLIP_RATIO: float(self.batch[IS_TRUNCATED].float().mean()),
            PROMPT_LENGTH_MEAN: sum(len(prompt.token_ids) for prompt in self.prompts) / num_rows,
            REWARD_ERROR_RATE: self.scores.num_errors / num_rows,
            REWARD_TIMEOUT_RATE: self.scores.num_timeouts / num_rows,
        }

    def num_tokens(self) -> int:
        """Prompt and response tokens."""
        return sum(len(prompt.token_ids) for prompt in self.prompts) + int(self.batch[RESPONSE_MASK].sum())


@dataclass(frozen=True)
class Rewarding:
    """The job's reward: what it is called, how it fails, and the processes that compute it."""

    spec: Reward
    scorer_name: str
    pool: ScorerPool

    def score(self, requests: Sequence[RewardRequest]) -> Scores:
        """Raises RewardError when the reward fails and the job says so."""
        return settle(self.spec, self.scorer_name, requests, self.pool.submit(requests).result())


class RolloutPhase:
    """Generates and scores."""

    def __init__(self, hybrid: HybridGroup, rewarding: Rewarding, timer: PhaseTimer, stop: StopRequest) -> None:
        self.hybrid = hybrid
        self.rewarding = rewarding
        self.timer = timer
        self.stop = stop

    def run(self, prompts: Sequence[PromptRow], sampling: SamplingSettings, seeds: torch.Tensor) -> ScoredRollout:
        """One response per element of `prompts` (repeat a prompt for a group). `seeds` is [B] int64.

        Raises RewardError when the reward fails and the job says so, StepAbandonedError when a stop was asked for
        meanwhile."""
        width = max(len(prompt.token_ids) for prompt in prompts) + sampling.max_new_tokens
        request = DataProto({SAMPLE_SEEDS: seeds}, {PROMPT_TOKEN_IDS: tuple(prompt.token_ids for prompt in prompts)})
        with self.timer.phase("rollout"):
            batch = _trimmed(self.hybrid.generate_sequences(request, sampling, width))
        responses = tuple(str(text) for text in batch.object_column(RESPONSE_TEXTS))
        with self.timer.phase("reward"):
            requests = [
                RewardRequest(prompt.prompt, response, prompt.answer, prompt.row)
                for prompt, response in zip(prompts, responses, strict=True)
            ]
            scores = self._score(requests)
        rewards_B = torch.tensor(scores.scores, dtype=torch.float32)
        return ScoredRollout(tuple(prompts), batch, responses, scores, rewards_B)

    def _score(self, requests: Sequence[RewardRequest]) -> Scores:
        """Scores are not trusted once a stop was asked for: Ray signals what the reward has started, too."""
        try:
            scores = self.rewarding.score(requests)
        except RewardError as error:
            if self.stop.is_requested:
                raise StepAbandonedError from error
            raise
        if self.stop.is_requested:
            raise StepAbandonedError
        return scores


def sample_seeds(job_seed: int, stream: int, step: int, count: int) -> torch.Tensor:
    """[count] int64 seeds that depend on nothing but the arguments, so that a resumed run draws the same ones.

    `stream` keeps training and evaluation apart."""
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([job_seed, stream, step])))
    return torch.from_numpy(generator.integers(0, MAX_SEED, size=count, dtype=np.int64))


def _trimmed(batch: DataProto) -> DataProto:
    """Without the columns of padding that no row needs."""
    used = batch[RESPONSE_MASK].any(dim=0).nonzero()
    width = int(used.max()) + 1 if len(used) else 1
    wide = {name: column[:, :width].contiguous() for name, column in batch.tensors.items() if column.dim() == 2}
    return batch.with_columns(wide)
