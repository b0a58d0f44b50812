"""Evaluations: scores of responses to prompts that are not trained on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, StrictStr

from rljob_api.base import WireModel
from rljob_api.rule import rule
from rljob_api.scalars import REWARD_NAME, Count, Flag, Number, OpenFraction, PositiveCount, Temperature
from rljob_api.v1alpha1.dataset import Dataset
from rljob_api.v1alpha1.reward import RewardName

EvaluationName = Annotated[StrictStr, Field(max_length=63, pattern=REWARD_NAME)]

MAX_SAMPLES = 1024
EVALUATION_METRICS = "eval/"
"""The metrics of an evaluation are `eval/<name>/...`."""


class Evaluation(WireModel):
    """Scoring of greedy and sampled responses to held-out prompts, each time the same prompts.

    Training does not use rows whose prompt is among the prompts of an evaluation."""

    name: EvaluationName = "heldout"
    """Name in metrics and samples, for example `gsm8k`."""
    dataset: Dataset | None = None
    """Rows with held-out prompts. Fields as in training.dataset; unset if that is unset."""
    rewards: Annotated[tuple[RewardName, ...], Field(min_length=1, max_length=16)] | None = None
    """Names of the rewards that score the responses; all when unset.

    The score is the weighted sum of these rewards. If all of them have weight 0, each counts with weight 1. Other
    rewards do not run."""
    num_prompts: PositiveCount = 256
    """Number of prompts: the first rows of the dataset, or all if it has fewer. Without a dataset: number of rollouts,
    whose environments have other seeds than those of training."""
    every_steps: Count = 20
    """Evaluate after every n-th training step, and after the last one; 0: only after the last one."""
    at_start: Flag = True
    """Evaluate before the first step."""
    greedy: Flag = True
    """Generate one greedy response per prompt."""
    num_samples: Annotated[Count, Field(le=MAX_SAMPLES)] = 1
    """Number of sampled responses per prompt in addition to the greedy one."""
    temperature: Temperature = 1.0
    """Sampling temperature of the sampled responses."""
    top_p: OpenFraction = 1.0
    """Sample from the most likely tokens whose probabilities add up to this number; 1: from all."""
    max_new_tokens: PositiveCount | None = None
    """Largest length of a response in tokens, at most rollout.maxNewTokens; rollout.maxNewTokens when unset."""
    pass_threshold: Number = 1.0
    """A response with at least this score passes (metric pass_at_k)."""


def metric_names(evaluation: Evaluation) -> Iterator[str]:
    """Returns the metrics of all prompts of an evaluation that have a fixed name; the first is its main score. Those of
    single rewards and sources have further names."""
    prefix = f"{EVALUATION_METRICS}{evaluation.name}/"
    num_samples = evaluation.num_samples
    if evaluation.greedy:
        yield prefix + "greedy"
    if num_samples:
        yield f"{prefix}mean_at_{num_samples}"
        yield from (f"{prefix}pass_at_{k}" for k in pass_at_ks(num_samples))
        yield f"{prefix}maj_at_{num_samples}"
    yield prefix + "excluded_fraction"
    yield prefix + "response_length_mean"


def pass_at_ks(num_samples: int) -> list[int]:
    """The k of pass@k: the powers of two below `num_samples`, and `num_samples`. Example: 6 gives 1, 2, 4, 6."""
    return [*(1 << power for power in range(num_samples.bit_length()) if 1 << power < num_samples), num_samples]


@dataclass(frozen=True)
class EvaluationScores:
    """The mean scores of an evaluation."""

    name: str
    """Name of the evaluation."""
    labels: Mapping[str, str]
    """Words for people by the name of the metric, the main score first: `{"eval/heldout/greedy": "greedy",
    "eval/heldout/mean_at_4": "sampled"}`."""


def scores_of(evaluations: Iterable[Evaluation]) -> list[EvaluationScores]:
    """The mean scores of each evaluation. The first of an evaluation is its main score: that of greedy responses, or
    without them that of sampled ones."""
    found = []
    for each in evaluations:
        labels = {f"{EVALUATION_METRICS}{each.name}/greedy": "greedy"} if each.greedy else {}
        if each.num_samples:
            labels[f"{EVALUATION_METRICS}{each.name}/mean_at_{each.num_samples}"] = "sampled"
        found.append(EvaluationScores(each.name, labels))
    return found


EVALUATION_RULES = (
    rule(
        Evaluation,
        "Evaluation.responses",
        field=".numSamples",
        cel="self.greedy || self.numSamples > 0",
        wrong="must be above 0 with greedy: false, or there is no response",
        advice="increase numSamples, or remove greedy: false",
        holds=lambda evaluation: evaluation.greedy or evaluation.num_samples > 0,
    ),
)
