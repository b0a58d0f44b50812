"""Evaluation on held-out prompts: the same prompts each time, with greedy and with sampled responses."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from rljob_api.v1alpha1.dataset import Evaluation as EvaluationSpec
from rljob_api.v1alpha1.training import Training
from rljob_trainer.controller.outcomes import reasons_text
from rljob_trainer.controller.rollout import Rollout
from rljob_trainer.controller.rollout_phase import RolloutPhase, sample_seeds
from rljob_trainer.datasets.prompts import PromptRow
from rljob_trainer.engines.rollout.base import SamplingSettings
from rljob_trainer.observability.metrics import (
    EVAL_GREEDY,
    EVAL_GREEDY_EXCLUDED,
    EVAL_SAMPLED,
    EVAL_SAMPLED_EXCLUDED,
)
from rljob_trainer.observability.samples import Sample, SampleKind
from rljob_trainer.observability.timing import PhaseTimer

log = logging.getLogger(__name__)

EVALUATION_STREAM = 1
"""The stream of `sample_seeds` for evaluations."""
ENVIRONMENT_STREAM = 9
"""The stream for the environments of evaluations."""


class Evaluation:
    """Scores the current policy. Sampled responses have the same seeds in every evaluation."""

    def __init__(
        self,
        spec: EvaluationSpec,
        prompts: Sequence[PromptRow],
        max_new_tokens: int,
        stop: tuple[str, ...],
        rollout: RolloutPhase,
        timer: PhaseTimer,
        seed: int,
    ) -> None:
        self.spec = spec
        self.prompts = tuple(prompts)
        self.rollout = rollout
        self.timer = timer
        self.seed = seed
        self.greedy = SamplingSettings(temperature=0.0, top_p=1.0, top_k=0, max_new_tokens=max_new_tokens, stop=stop)
        self.sampled = replace(self.greedy, temperature=spec.temperature)

    @staticmethod
    def of(
        training: Training, prompts: Sequence[PromptRow], rollout: RolloutPhase, timer: PhaseTimer
    ) -> Evaluation | None:
        """Returns None for a job without evaluation. `prompts` are held out."""
        if training.evaluation is None:
            return None
        max_new_tokens, stop = training.rollout.max_new_tokens, training.rollout.stop
        return Evaluation(training.evaluation, prompts, max_new_tokens, stop, rollout, timer, training.seed)

    def is_due(self, step: int, num_steps: int) -> bool:
        """Whether to evaluate after `step` steps of `num_steps`."""
        if step == 0:
            return self.spec.at_start
        return step == num_steps or (self.spec.every_steps > 0 and step % self.spec.every_steps == 0)

    def run(self, step: int) -> tuple[dict[str, float], list[Sample], dict[SampleKind, Rollout]]:
        """Evaluates after `step` steps; returns mean scores as metrics, all samples, and the responses."""
        with self.timer.phase("eval"):
            environment_seeds_B = sample_seeds(self.seed, ENVIRONMENT_STREAM, 0, len(self.prompts))
            seeds_B = torch.zeros(len(self.prompts), dtype=torch.int64)
            greedy = self.rollout.run(self.prompts, 1, self.greedy, seeds_B, environment_seeds_B)
            metrics = mean_scores(greedy, EVAL_GREEDY, EVAL_GREEDY_EXCLUDED)
            rollouts = {SampleKind.GREEDY: greedy}
            if self.spec.num_samples:
                num_responses = len(self.prompts) * self.spec.num_samples
                seeds_B = sample_seeds(self.seed, EVALUATION_STREAM, 0, num_responses)
                sampled = self.rollout.run(
                    self.prompts, self.spec.num_samples, self.sampled, seeds_B, environment_seeds_B
                )
                metrics |= mean_scores(sampled, EVAL_SAMPLED, EVAL_SAMPLED_EXCLUDED)
                rollouts[SampleKind.SAMPLED] = sampled
            samples = [each for kind, found in rollouts.items() for each in self.rollout.samples(found, step, kind)]
        return metrics, samples, rollouts


def mean_scores(rollout: Rollout, metric: str, excluded_metric: str) -> dict[str, float]:
    """Returns the mean of the weighted reward sums as `metric`, and with several rewards also the mean of each as
    `metric/<reward name>`. Without rewards there is no mean. A mean is over the responses that have the score, and
    missing if none has it. The fraction
    of responses without a weighted sum is `excluded_metric`; a warning is logged if it is not 0."""
    is_excluded_B = rollout.is_excluded_B
    if is_excluded_B.any():
        log.warning(
            "evaluation: %d of %d responses have no score (%s); %s is the mean of the others",
            *(int(is_excluded_B.sum()), len(is_excluded_B), reasons_text(rollout.reasons()), metric),
        )
    named = rollout.named_rewards_B if len(rollout.weights) > 1 else {}
    total = {metric: rollout.rewards_B} if rollout.weights else {}
    values = {**total, **{f"{metric}/{name}": rewards_B for name, rewards_B in named.items()}}
    scored = {name: values_B[~values_B.isnan()] for name, values_B in values.items()}
    return {
        **{name: float(values_S.mean()) for name, values_S in scored.items() if len(values_S)},
        excluded_metric: float(is_excluded_B.double().mean()),
    }
