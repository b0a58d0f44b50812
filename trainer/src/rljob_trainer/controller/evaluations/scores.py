"""The metrics of an evaluation, computed from its scored responses. These are pure functions. Sums are exact, so the
order of the responses does not change any bit of a metric."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rljob_api.v1alpha1.dataset import EVALUATION_METRICS, Evaluation, pass_at_ks
from rljob_trainer.datasets.prompts import SOURCE

ROUNDING = 1e-9
"""A weighted sum of rewards passes if it is below the threshold by no more than this."""


@dataclass(frozen=True, slots=True)
class ScoredResponse:
    """A response of an evaluation."""

    prompt: int
    """Number of its prompt."""
    score: float | None
    """Weighted sum of the rewards; None if it has no score."""
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    """The score of each reward, by name."""
    answer: str | None = None
    """The extracted answer; empty if none was found, None if no reward extracts answers."""
    num_tokens: int = 0
    source: str = ""
    """Name of the source of its prompt; empty without `sourceField`."""


def evaluation_metrics(
    spec: Evaluation, greedy: Sequence[ScoredResponse], sampled: Sequence[ScoredResponse]
) -> dict[str, float]:
    """Returns the metrics of an evaluation; see docs/evaluation.md for their meaning. A metric that cannot be computed,
    because no response has a score, is missing."""
    prefix = f"{EVALUATION_METRICS}{spec.name}/"
    responses = [*greedy, *sampled]
    found = _score_metrics(spec, greedy, sampled)
    names = responses[0].rewards if responses else ()
    if len(names) > 1:
        for name in names:
            found[f"reward/{name}/greedy"] = _mean(each.rewards[name] for each in greedy)
            means = (_mean(each.rewards[name] for each in of_prompt) for of_prompt in _by_prompt(sampled))
            found[f"reward/{name}/mean_at_{spec.num_samples}"] = _mean(means)
    found["response_length_mean"] = _mean(float(each.num_tokens) for each in responses)
    for source in sorted({each.source for each in responses if each.source}):
        parts = ([each for each in part if each.source == source] for part in (greedy, sampled))
        found |= {f"{SOURCE}/{source}/{name}": value for name, value in _score_metrics(spec, *parts).items()}
    return {prefix + name: value for name, value in found.items() if value is not None}


def _score_metrics(
    spec: Evaluation, greedy: Sequence[ScoredResponse], sampled: Sequence[ScoredResponse]
) -> dict[str, float | None]:
    """Returns the scores of these responses, and the fraction without a score."""
    k, by_prompt = spec.num_samples, _by_prompt(sampled)
    return {
        "greedy": _mean(each.score for each in greedy),
        f"mean_at_{k}": _mean(_mean(each.score for each in of_prompt) for of_prompt in by_prompt),
        **{f"pass_at_{n}": mean_pass_at_k(by_prompt, n, spec.pass_threshold) for n in pass_at_ks(k) if k},
        f"maj_at_{k}": _mean(majority_score(responses) for responses in by_prompt),
        "excluded_fraction": _mean(float(each.score is None) for each in (*greedy, *sampled)),
    }


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Unbiased estimate of the probability that at least one of k responses passes, if `num_passed` of `num_samples`
    responses did: 1 - C(n - c, k) / C(n, k), computed as a product that does not overflow.

    Source: Chen et al. 2021, arXiv 2107.03374, equation 1 and figure 3. Needs k <= num_samples."""
    if num_samples - num_passed < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / number for number in range(num_samples - num_passed + 1, num_samples + 1))


def mean_pass_at_k(by_prompt: Iterable[Sequence[ScoredResponse]], k: int, threshold: float) -> float | None:
    """Returns the mean of `pass_at_k` over the prompts with a score; None without any.

    A prompt with m < k scores counts with m instead of k, which is a lower bound. So all k have the same prompts. Then
    pass@k never decreases with k, and pass@1 of scores 0 and 1 is their mean."""

    def of_prompt(responses: Sequence[ScoredResponse]) -> float | None:
        scores = [each.score for each in responses if each.score is not None]
        num_passed = sum(score >= threshold - ROUNDING for score in scores)
        return pass_at_k(len(scores), num_passed, min(k, len(scores))) if scores else None

    return _mean(map(of_prompt, by_prompt))


def majority_score(responses: Iterable[ScoredResponse]) -> float | None:
    """Returns the score of the most frequent answer to a prompt: the mean score of the responses that gave it. If
    several answers are equally frequent, the mean of their scores counts. Responses without an answer do not vote; if
    no response has one, their mean score counts. None if no reward extracts answers, or no response has a score."""
    scored = [each for each in responses if each.score is not None and each.answer is not None]
    voters = [each for each in scored if each.answer] or scored
    scores: dict[str, list[float]] = {}
    for each in voters:
        if each.answer is not None and each.score is not None:
            scores.setdefault(" ".join(each.answer.split()), []).append(each.score)
    most = max(map(len, scores.values()), default=0)
    return _mean(_mean(values) for values in scores.values() if len(values) == most)


def _by_prompt(responses: Sequence[ScoredResponse]) -> list[list[ScoredResponse]]:
    found: dict[int, list[ScoredResponse]] = {}
    for each in responses:
        found.setdefault(each.prompt, []).append(each)
    return list(found.values())


def _mean(values: Iterable[float | None]) -> float | None:
    """The mean of the values that are not None; None without any."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None
