"""Evaluations on held-out prompts: the same prompts each time, with greedy and with sampled responses."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from rljob_api.v1alpha1.dataset import Evaluation as EvaluationSpec
from rljob_api.v1alpha1.environment_rules import rewards_of
from rljob_api.v1alpha1.reward import Reward, RewardType
from rljob_api.v1alpha1.training import Training
from rljob_trainer.controller.evaluations.scores import ScoredResponse, evaluation_metrics
from rljob_trainer.controller.outcomes import Reasons, reasons_text, too_many_excluded
from rljob_trainer.controller.prompt_batches import sample_seeds
from rljob_trainer.controller.rollout import Rollout
from rljob_trainer.controller.rollout_phase import RolloutPhase
from rljob_trainer.datasets.prompts import PromptRow, evaluation_dataset
from rljob_trainer.engines.rollout.base import SamplingSettings
from rljob_trainer.errors import TrainerError
from rljob_trainer.observability.metrics import Metrics
from rljob_trainer.observability.samples import Sample, SampleKind
from rljob_trainer.observability.timing import PhaseTimer
from rljob_trainer.workers.columns import RESPONSE_LENGTHS

log = logging.getLogger(__name__)

EVALUATION_STREAM = 1
"""The stream of `sample_seeds` for evaluations."""
ENVIRONMENT_STREAM = 9
"""The stream for the environments of evaluations."""
EXTRACTS_ANSWERS = (RewardType.MATH_ANSWER, RewardType.REASONING_GYM, RewardType.FUNCTION)
"""Types of rewards whose `found` is an answer, on which responses can agree. `found` of a judge is the judge's text;
`found` of Code is a report of tests."""


@dataclass(frozen=True)
class EvaluationResult:
    """The results of one evaluation at one step."""

    name: str
    metrics: Metrics
    samples: Sequence[Sample]
    """All responses."""
    rollouts: Mapping[SampleKind, Rollout]


class Evaluation:
    """Scores the current policy. Sampled responses have the same seeds each time."""

    def __init__(
        self,
        spec: EvaluationSpec,
        training: Training,
        prompts: Sequence[PromptRow],
        rollout: RolloutPhase,
        timer: PhaseTimer,
    ) -> None:
        """`prompts` are held out."""
        self.spec = spec
        self.prompts = tuple(prompts)
        self.rollout = rollout
        self.timer = timer
        self.seed = training.seed
        self.weights = reward_weights(spec, training)
        self.rewards = rewards_of(spec, training)
        max_new_tokens = spec.max_new_tokens or training.rollout.max_new_tokens
        self.greedy = SamplingSettings(
            temperature=0.0, top_p=1.0, top_k=0, max_new_tokens=max_new_tokens, stop=training.rollout.stop
        )
        self.sampled = replace(self.greedy, temperature=spec.temperature, top_p=spec.top_p)

    def is_due(self, step: int, num_steps: int) -> bool:
        """Whether to evaluate after `step` steps of `num_steps`. A job without steps does all of its evaluations."""
        if step == 0 and num_steps > 0:
            return self.spec.at_start
        return step == num_steps or (self.spec.every_steps > 0 and step % self.spec.every_steps == 0)

    def run(self, step: int) -> EvaluationResult:
        """Evaluates after `step` steps."""
        num_samples = {SampleKind.GREEDY: int(self.spec.greedy), SampleKind.SAMPLED: self.spec.num_samples}
        with self.timer.phase("eval"):
            rollouts = {kind: self._responses(kind, number) for kind, number in num_samples.items() if number}
            samples = {kind: self.rollout.samples(found, step, kind) for kind, found in rollouts.items()}
        scored = {kind: self._scored_responses(samples[kind], found) for kind, found in rollouts.items()}
        metrics = evaluation_metrics(self.spec, scored.get(SampleKind.GREEDY, []), scored.get(SampleKind.SAMPLED, []))
        of_this = [replace(each, evaluation=self.spec.name) for found in samples.values() for each in found]
        return EvaluationResult(self.spec.name, metrics, of_this, rollouts)

    def _responses(self, kind: SampleKind, num_samples: int) -> Rollout:
        """Generates and scores `num_samples` responses to each prompt."""
        environment_seeds = sample_seeds(self.seed, ENVIRONMENT_STREAM, 0, len(self.prompts))
        sampling, seeds_B = self.greedy, torch.zeros(len(self.prompts), dtype=torch.int64)
        if kind is SampleKind.SAMPLED:
            sampling = self.sampled
            seeds_B = sample_seeds(self.seed, EVALUATION_STREAM, 0, len(self.prompts) * num_samples)
        found = self.rollout.run(self.prompts, num_samples, sampling, seeds_B, environment_seeds, self.weights)
        is_excluded_B = found.is_excluded_B
        if is_excluded_B.any():
            log.warning(
                "evaluation %s: %d of %d responses have no score (%s); its scores are means over the other responses",
                *(self.spec.name, int(is_excluded_B.sum()), len(is_excluded_B), reasons_text(found.reasons())),
            )
        return found

    def _scored_responses(self, samples: Sequence[Sample], rollout: Rollout) -> list[ScoredResponse]:
        lengths: list[int] = rollout.batch[RESPONSE_LENGTHS].tolist()
        answers = extracted_answers(samples, self.rewards)
        return [
            ScoredResponse(sample.group, sample.score, sample.rewards, answer, length, prompt.source)
            for sample, answer, length, prompt in zip(samples, answers, lengths, rollout.prompts, strict=True)
        ]


def evaluation_error(results: Sequence[EvaluationResult], max_rate: float) -> TrainerError | None:
    """Returns the error of a job that only evaluates, if too many responses of an evaluation have no score."""
    for each in results:
        rollouts = each.rollouts.values()
        num_responses = sum(len(found.prompts) for found in rollouts)
        num_excluded = sum(int(found.is_excluded_B.sum()) for found in rollouts)
        if num_excluded > max_rate * num_responses or num_excluded == num_responses:
            reasons = sum((found.reasons() for found in rollouts), Reasons())
            counted = f"{num_excluded} of {num_responses} responses of evaluation {each.name}"
            return too_many_excluded(counted, max_rate, "the responses of an evaluation", reasons)
    return None


def evaluations_of(
    training: Training, held_out: Mapping[str, Sequence[PromptRow]], rollout: RolloutPhase, timer: PhaseTimer
) -> list[Evaluation]:
    """Returns the evaluations of a job, in order. `held_out`: see `Prompts.held_out`."""
    return [
        Evaluation(spec, training, held_out[evaluation_dataset(index)], rollout, timer)
        for index, spec in enumerate(training.evaluations)
    ]


def reward_weights(spec: EvaluationSpec, training: Training) -> dict[str, float]:
    """Returns the weights of the rewards that score an evaluation, by name. If all are 0, each becomes 1."""
    weights = {reward.name: reward.weight for reward in rewards_of(spec, training)}
    return weights if any(weights.values()) else dict.fromkeys(weights, 1.0)


def extracted_answers(samples: Sequence[Sample], rewards: Sequence[Reward]) -> list[str | None]:
    """Returns the answers of the first of these rewards that has extracted any; see `ScoredResponse.answer`."""
    names = [each.name for each in rewards if each.type in EXTRACTS_ANSWERS]
    used = next((name for name in names if any(name in each.found for each in samples)), None)
    return [None if used is None else each.found.get(used, "") for each in samples]
