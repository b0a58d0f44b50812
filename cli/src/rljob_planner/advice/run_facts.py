"""Measurements of a run: seconds of each phase, lengths, memory and balance, from the lines of its metrics.jsonl.

docs/metrics.md explains the names (trainer, observability/metrics.py). Medians leave out the first step, because it
loads models, compiles, and allocates memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from statistics import NormalDist, fmean, median

from rljob_planner.errors import PlanError
from rljob_planner.timing.step import OLD_LOGPROB, OTHER, PHASES, REF, REWARD, VALUES
from rljob_planner.workload import TokenLengths, Workload

_STANDARD = NormalDist()
_LEAST_SIGMA, _LARGEST_SIGMA = 0.01, 2.0


@dataclass(frozen=True)
class ObservedLengths:
    """Lengths in tokens of one step, or means over several steps; with the share of responses that were trained on, and
    the factor by which dynamic sampling generated more."""

    prompt_mean: float
    """0 if the metrics do not have it."""
    response_mean: float
    """After truncation; 0 if the metrics do not have it."""
    response_max: float
    """The longest response of a step; 0 if the metrics do not have it. For several steps: the mean over the longest
    response of each step."""
    clip_ratio: float
    """Share of truncated responses."""
    trained_fraction: float = 1.0
    """Share of the responses that were trained on."""
    generation_factor: float = 1.0
    """The number of prompts for which responses were generated, divided by the batch size. Above 1 with dynamic
    sampling."""

    @classmethod
    def together(cls, steps: Sequence[ObservedLengths]) -> ObservedLengths:
        """Means over one or more steps, which must have the same number of responses."""
        return cls(*map(fmean, zip(*map(astuple, steps), strict=True)))

    def token_lengths(self, planned: TokenLengths, num_responses: int) -> TokenLengths:
        """These lengths as `TokenLengths`. Limits, and means that the metrics do not have, come from `planned`.
        `num_responses`: responses per step."""
        prompt = _within(planned.prompt_max, self.prompt_mean, planned.prompt_mean)
        response = _within(planned.response_max, self.response_mean, planned.response_mean)
        longest = _within(planned.response_max, self.response_max, response)
        clipped = min(1.0, max(0.0, self.clip_ratio))
        sigma = _sigma(response, longest, num_responses)
        return TokenLengths(
            prompt_mean=prompt,
            prompt_max=planned.prompt_max,
            response_mean=response,
            response_max=planned.response_max,
            response_cv=math.sqrt(math.expm1(sigma * sigma)),
            clipped_share=clipped,
            assumption=(
                f"as in the run: mean {response:,.0f}, longest {longest:,.0f},"
                f" {clipped:.1%} truncated at {planned.response_max:,}"
            ),
            conversation_max=planned.conversation_max,
            num_turns=planned.num_turns,
        )


def _within(limit: int, length: float, otherwise: float) -> float:
    """`length`, but at least 1 and at most `limit`; `otherwise` if the metrics do not have this length (it is 0
    then)."""
    return min(float(limit), max(1.0, length)) if length > 0 else otherwise


def _sigma(mean: float, longest: float, num_responses: int) -> float:
    """Standard deviation of the logarithm of the lengths of n responses, if none is truncated.

    The longest is approximately the quantile 1 - 1 / 2n, as in timing/lengths.py. With z, that quantile of the standard
    normal distribution, longest = exp(m + z s) and mean = exp(m + s^2 / 2) give s = z - sqrt(z^2 - 2 ln(longest /
    mean)). If there is no solution, s = z is the nearest. The result is limited to the range from _LEAST_SIGMA to
    _LARGEST_SIGMA."""
    if mean <= 0 or longest <= mean:
        return _LEAST_SIGMA
    z = _STANDARD.inv_cdf(1 - 0.5 / max(2, num_responses))
    under_root = z * z - 2 * math.log(longest / mean)
    sigma = z - math.sqrt(under_root) if under_root > 0 else z
    return min(_LARGEST_SIGMA, max(_LEAST_SIGMA, sigma))


MetricsLine = Mapping[str, float]
"""One line of metrics.jsonl: metrics by name. `step` is the number of the step, from 1."""

DURING_REWARDS = (OLD_LOGPROB, REF, VALUES)
"""Phases during which rewards are computed, if the passes do not wait for the scores."""
NO_WAIT_SECONDS, NO_WAIT_SHARE = 0.01, 0.02
"""A wait for rewards counts as no wait if it is not longer than this many seconds, or than this share of the phases
DURING_REWARDS. Even requesting and fetching scores takes as long as this."""
STEP_SECONDS = "timing_s/step"


@dataclass(frozen=True)
class Measured:
    """Statistics of a number over several steps."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Measured:
        """Median, minimum and maximum of at least one value."""
        return cls(median(values), min(values), max(values))


@dataclass(frozen=True)
class StepFacts:
    """Measurements of one step."""

    step: int
    """Number of the step, from 1."""
    seconds: float
    phases: Mapping[str, float]
    """Seconds of each phase of the step. Keys are names of PHASES, and OTHER. Phases that the step did not have are
    missing."""
    lengths: ObservedLengths


@dataclass(frozen=True)
class RunFacts:
    """Measurements of a run."""

    num_steps: int
    """Finished steps."""
    steps: tuple[StepFacts, ...]
    """All steps except the first. If the run has only one step: this step."""
    memory: Mapping[str, float]
    """The largest bytes over all steps except the first, by the name of the metric: `parameters`, `during_generate`,
    `after_sleep`, `process`, ..."""
    first_memory: Mapping[str, float]
    """The same for the first step, which starts without the optimizer's moments."""
    micro_batch_imbalance: float | None
    """The cost of the most expensive micro-batches, divided by the mean over the workers; the mean of this over the
    steps. None if the metrics do not have it."""
    has_gpu: bool
    """Whether workers computed on GPUs. Their metrics show this: only they have `memory/other_bytes_max`."""
    longest_prompt: float = 0.0
    """Tokens of the longest prompt; 0 if the metrics do not have it."""

    @property
    def step(self) -> Measured:
        """Seconds of a step."""
        return Measured.of([each.seconds for each in self.steps])

    @property
    def phases(self) -> dict[str, Measured]:
        """Seconds of each phase, in the order of PHASES. For a step without the phase, they count as 0."""
        names = [name for name in (*PHASES, OTHER) if any(name in each.phases for each in self.steps)]
        return {name: Measured.of([each.phases.get(name, 0.0) for each in self.steps]) for name in names}

    @property
    def lengths(self) -> ObservedLengths:
        """Means over the steps."""
        return ObservedLengths.together([each.lengths for each in self.steps])


def facts_of(lines: Sequence[MetricsLine], batch_size: int, file: str = "metrics.jsonl") -> RunFacts:
    """The measurements of a run with `batch_size` prompts per step. Several lines of one step are merged. `file`: the
    file of these lines, for messages.

    Raises:
        PlanError: there is no finished step.
    """
    merged: dict[int, dict[str, float]] = {}
    for line in lines:
        if "step" in line:
            merged.setdefault(int(line["step"]), {}).update(line)
    rows = [merged[step] for step in sorted(merged) if merged[step].get(STEP_SECONDS, 0.0) > 0]
    if not rows:
        raise PlanError(
            f"{file}: no finished step (seen {len(lines)} lines); wait until the run has finished its second"
            " step, or choose another run"
        )
    later = rows[1:] or rows
    imbalances = [row["perf/micro_batch_imbalance"] for row in later if "perf/micro_batch_imbalance" in row]
    return RunFacts(
        num_steps=len(rows),
        steps=tuple(_step_facts(row, batch_size) for row in later),
        memory=_largest_memory(later),
        first_memory=_largest_memory(rows[:1]),
        micro_batch_imbalance=fmean(imbalances) if imbalances else None,
        has_gpu=any("memory/other_bytes_max" in row for row in rows),
        longest_prompt=max(row.get("prompt_length/max", 0.0) for row in rows),
    )


def observed_workload(workload: Workload, facts: RunFacts | StepFacts) -> Workload:
    """The job's work with measured lengths, shares and reward seconds instead of assumed ones: those of the run, or of
    one step."""
    phases = {name: each.median if isinstance(each, Measured) else each for name, each in facts.phases.items()}
    seen = facts.lengths
    return replace(
        workload,
        lengths=seen.token_lengths(workload.lengths, workload.num_responses),
        trained_fraction=seen.trained_fraction,
        generation_factor=seen.generation_factor,
        reward_seconds=_reward_seconds(workload, phases),
    )


def workload_for_memory(workload: Workload, facts: RunFacts) -> Workload:
    """The same as `observed_workload`, but for a comparison of memory. The longest row has the mean length in the step
    that trained on the most tokens, times the share of responses that this step trained on; because rows as long as a
    plan assumes hardly ever occur in a run. The longest sequence of the engine has the longest prompt of the run, if
    the metrics have it."""
    steps = [each.lengths for each in facts.steps]
    fullest = max(steps, key=lambda each: each.trained_fraction * (each.prompt_mean + each.response_mean))
    observed = observed_workload(workload, facts)
    seen = fullest.token_lengths(workload.lengths, workload.num_responses)
    lengths = replace(
        observed.lengths,
        prompt_max=max(1, math.floor(seen.prompt_mean * fullest.trained_fraction)),
        response_max=max(1, math.ceil(seen.response_mean * fullest.trained_fraction)),
    )
    prompt = math.ceil(facts.longest_prompt) or workload.lengths.prompt_max
    longest = min(observed.rollout.max_model_length, prompt + workload.lengths.response_max)
    return replace(observed, lengths=lengths, rollout=replace(observed.rollout, max_model_length=longest))


def _reward_seconds(workload: Workload, phases: Mapping[str, float]) -> float:
    """Seconds of all rewards of a step. If passes ran at the same time, `timing_s/reward` has only the time that the
    controller still waited after them (trainer, controller/training_step.py). If it did not wait, rewards took no
    longer than the passes, and the result is 0, which means unknown."""
    waited = phases.get(REWARD, 0.0)
    if workload.waits_for_scores:
        return waited
    in_passes = sum(phases.get(name, 0.0) for name in DURING_REWARDS)
    is_no_wait = in_passes > 0 and waited <= max(NO_WAIT_SECONDS, NO_WAIT_SHARE * in_passes)
    return 0.0 if is_no_wait else waited + in_passes


def _step_facts(row: MetricsLine, batch_size: int) -> StepFacts:
    seconds = row[STEP_SECONDS]
    phases = {name: max(0.0, row[f"timing_s/{name}"]) for name in PHASES if f"timing_s/{name}" in row}
    # Only these phases are subtracted. The other timings are parts of them.
    phases[OTHER] = max(0.0, seconds - sum(phases.values()))
    prompts = row.get("dynamic_sampling/prompts", float(batch_size))
    return StepFacts(
        step=int(row["step"]),
        seconds=seconds,
        phases=phases,
        lengths=ObservedLengths(
            prompt_mean=row.get("prompt_length/mean", 0.0),
            response_mean=row.get("response_length/mean", 0.0),
            response_max=row.get("response_length/max", 0.0),
            clip_ratio=row.get("response_length/clip_ratio", 0.0),
            trained_fraction=min(1.0, max(0.0, row.get("actor/trained_fraction", 1.0))),
            generation_factor=max(1.0, prompts / batch_size),
        ),
    )


def _largest_memory(rows: Sequence[MetricsLine]) -> dict[str, float]:
    """The largest value of each metric `memory/NAME_bytes_max`, by NAME."""
    found: dict[str, float] = {}
    for name, value in (item for row in rows for item in row.items()):
        short = name.removeprefix("memory/").removesuffix("_bytes_max")
        if name == f"memory/{short}_bytes_max":
            found[short] = max(found.get(short, 0.0), value)
    return found
