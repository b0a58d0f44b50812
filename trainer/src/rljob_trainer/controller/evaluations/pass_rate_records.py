"""Records the pass rates of a step's prompts, which decide how often these prompts are drawn (`promptSampling`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rljob_trainer.controller.evaluations.scores import ROUNDING
from rljob_trainer.controller.prompt_sets import Cursor
from rljob_trainer.controller.rollout import Rollout
from rljob_trainer.datasets.cursor import PromptCursor
from rljob_trainer.datasets.pass_rates import PassRates
from rljob_trainer.datasets.prompts import PromptRow
from rljob_trainer.observability.metrics import (
    PASS_RATE_MEAN,
    SAMPLING_PROMPTS,
    SAMPLING_RETURNED,
    SOURCE_PASS_RATE,
    SOURCE_PREFIX,
)
from rljob_trainer.workers.columns import SCORES


def record_pass_rates(
    cursor: Cursor, rollout: Rollout, threshold: float, metrics: Mapping[str, float]
) -> dict[str, float]:
    """Records the pass rates of a step in the cursor. Prompts that dynamic sampling has returned to the stream do not
    count, so the result does not depend on how many prompts dynamic sampling has drawn at once.

    Args:
        cursor: The stream of training prompts, directly after the step.
        rollout: All responses of the step.
        threshold: A response with at least this score passes.
        metrics: Those of the step.

    Returns further metrics."""
    num_groups = int(metrics.get(SAMPLING_PROMPTS, len(rollout.prompts)) - metrics.get(SAMPLING_RETURNED, 0))
    of_datasets = _pass_rates_of(cursor)
    for prompt, rate in pass_rates(rollout, threshold, num_groups):
        of_datasets[prompt.dataset].record(prompt.index, rate)
    means = {name: rates.mean() for name, rates in of_datasets.items()}
    return {
        f"{SOURCE_PREFIX}/{name}/{SOURCE_PASS_RATE}" if name else PASS_RATE_MEAN: mean
        for name, mean in means.items()
        if mean is not None
    }


def pass_rates(rollout: Rollout, threshold: float, num_groups: int) -> Iterator[tuple[PromptRow, float]]:
    """Yields the prompt and the pass rate of each of the first `num_groups` groups, in the order in which their prompts
    were drawn. Responses without a score do not count; groups without any score are left out."""
    passed: dict[int, list[bool]] = {}
    prompts: dict[int, PromptRow] = {}
    is_excluded: list[bool] = rollout.is_excluded_B.tolist()
    scores: list[float] = rollout.batch[SCORES].tolist()
    groups: list[int] = rollout.groups_B.tolist()
    for prompt, group, score, excluded in zip(rollout.prompts, groups, scores, is_excluded, strict=True):
        if not excluded and group < num_groups:
            prompts[group] = prompt
            passed.setdefault(group, []).append(score >= threshold - ROUNDING)
    for group in sorted(passed):
        yield prompts[group], sum(passed[group]) / len(passed[group])


def _pass_rates_of(cursor: Cursor) -> dict[str, PassRates]:
    """The pass rates of each dataset by its name, which is empty for the only one."""
    cursors = {"": cursor} if isinstance(cursor, PromptCursor) else {each.name: each.cursor for each in cursor.sources}
    return {name: each.pass_rates for name, each in cursors.items() if each.pass_rates is not None}
