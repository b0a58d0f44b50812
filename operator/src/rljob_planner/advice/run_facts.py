"""What a run has shown: seconds by phase, lengths, memory, balance, from the lines of its metrics.jsonl.

The names are those of docs/metrics.md (trainer, observability/metrics.py). The first step is left out of medians: it
loads, compiles and touches memory for the first time.
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
    """In tokens, of the responses of a step or of several; and how many of these were needed, and learned from."""

    prompt_mean: float
    response_mean: float
    """After the cut."""
    response_max: float
    """Of a step; of several the mean of their longest."""
    clip_ratio: float
    """Share that was cut off."""
    learned_fraction: float = 1.0
    generated_per_learned: float = 1.0
    """Prompts that were generated for, by those of the batch; above 1 with dynamic sampling."""

    @classmethod
    def together(cls, steps: Sequence[ObservedLengths]) -> ObservedLengths:
        """Means of several steps with as many responses each; at least one."""
        return cls(*map(fmean, zip(*map(astuple, steps), strict=True)))

    def token_lengths(self, planned: TokenLengths, num_responses: int) -> TokenLengths:
        """With the limits that were planned, and their means where the run says none; `num_responses` are those of a
        step."""
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
                f" {clipped:.1%} cut off at {planned.response_max:,}"
            ),
        )


def _within(limit: int, length: float, otherwise: float) -> float:
    """Tokens, of which there is at least one; metrics that lack a length have 0."""
    return min(float(limit), max(1.0, length)) if length > 0 else otherwise


def _sigma(mean: float, longest: float, num_responses: int) -> float:
    """Standard deviation of the logarithms, of so many responses none of which is cut off.

    The longest is about the quantile 1 - 1 / 2n, as in timing/lengths.py. With z that quantile of the standard normal
    distribution, longest = exp(m + z s) and mean = exp(m + s^2 / 2) give s = z - sqrt(z^2 - 2 ln(longest / mean));
    where that has no solution, s = z is the nearest."""
    if mean <= 0 or longest <= mean:
        return _LEAST_SIGMA
    z = _STANDARD.inv_cdf(1 - 0.5 / max(2, num_responses))
    under_root = z * z - 2 * math.log(longest / mean)
    sigma = z - math.sqrt(under_root) if under_root > 0 else z
    return min(_LARGEST_SIGMA, max(_LEAST_SIGMA, sigma))


MetricsLine = Mapping[str, float]
"""One row: the step (from 1) under `step`, and metrics by name."""

BESIDE_REWARDS = (OLD_LOGPROB, REF, VALUES)
"""Those that are waited for while rewards are computed."""
NOTHING_SECONDS, NOTHING_SHARE = 0.01, 0.02
"""Up to this long, or this share of those passes, it takes to ask for scores and to fetch what is there."""
STEP_SECONDS = "timing_s/step"


@dataclass(frozen=True)
class Measured:
    """One number of several steps."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Measured:
        """At least one value."""
        return cls(median(values), min(values), max(values))


@dataclass(frozen=True)
class StepFacts:
    """One step."""

    step: int
    """From 1."""
    seconds: float
    phases: Mapping[str, float]
    """Those of PHASES that the step had, and OTHER."""
    lengths: ObservedLengths


@dataclass(frozen=True)
class RunFacts:
    """What a run's metrics say."""

    num_steps: int
    """That were done."""
    steps: tuple[StepFacts, ...]
    """Without the first where there are others."""
    memory: Mapping[str, float]
    """Bytes, the largest of all steps but the first: `parameters`, `during_generate`, `after_sleep`, `process`, ..."""
    first_memory: Mapping[str, float]
    """The same of the first step, which begins without the optimizer's moments."""
    token_imbalance: float | None
    """Tokens of the busiest worker over those of the mean one; mean of the steps."""
    has_gpu: bool
    """Whether workers computed on GPUs: these alone say what else torch has given out."""
    longest_prompt: float = 0.0
    """Tokens; 0 where the run does not tell."""

    @property
    def step(self) -> Measured:
        """Seconds of a step."""
        return Measured.of([each.seconds for each in self.steps])

    @property
    def phases(self) -> dict[str, Measured]:
        """Seconds by phase, in the order of PHASES; a phase that some steps lack counts as 0 in them."""
        names = [name for name in (*PHASES, OTHER) if any(name in each.phases for each in self.steps)]
        return {name: Measured.of([each.phases.get(name, 0.0) for each in self.steps]) for name in names}

    @property
    def lengths(self) -> ObservedLengths:
        """Means over the steps, also of the longest response of each."""
        return ObservedLengths.together([each.lengths for each in self.steps])


def facts_of(lines: Sequence[MetricsLine], batch_size: int) -> RunFacts:
    """The facts of a run with so many prompts per step. Several lines of one step are one.

    Raises:
        PlanError: no step has its seconds.
    """
    merged: dict[int, dict[str, float]] = {}
    for line in lines:
        if "step" in line:
            merged.setdefault(int(line["step"]), {}).update(line)
    rows = [merged[step] for step in sorted(merged) if merged[step].get(STEP_SECONDS, 0.0) > 0]
    if not rows:
        raise PlanError(
            f"metrics.jsonl: no finished step is in it ({len(lines)} lines); wait for the second step of the run, "
            "or name the folder of another"
        )
    later = rows[1:] or rows
    imbalances = [row["perf/token_imbalance"] for row in later if "perf/token_imbalance" in row]
    return RunFacts(
        num_steps=len(rows),
        steps=tuple(_step_facts(row, batch_size) for row in later),
        memory=_largest_memory(later),
        first_memory=_largest_memory(rows[:1]),
        token_imbalance=fmean(imbalances) if imbalances else None,
        has_gpu=any("memory/other_bytes_max" in row for row in rows),
        longest_prompt=max(row.get("prompt_length/max", 0.0) for row in rows),
    )


def observed_workload(workload: Workload, facts: RunFacts | StepFacts) -> Workload:
    """The job's work with what the run, or one step of it, has shown in the place of what was assumed."""
    phases = {name: each.median if isinstance(each, Measured) else each for name, each in facts.phases.items()}
    seen = facts.lengths
    return replace(
        workload,
        lengths=seen.token_lengths(workload.lengths, workload.num_responses),
        learned_fraction=seen.learned_fraction,
        generated_per_learned=seen.generated_per_learned,
        reward_seconds=_reward_seconds(workload, phases),
    )


def workload_for_memory(workload: Workload, facts: RunFacts) -> Workload:
    """The same as `observed_workload`, with rows as long as they were on average in the step that learned from most
    tokens: a plan is for the longest rows there may be, and a run has hardly had these. The engine is built for the
    longest prompt of the data: that of the run, where it tells."""
    steps = [each.lengths for each in facts.steps]
    fullest = max(steps, key=lambda each: each.learned_fraction * (each.prompt_mean + each.response_mean))
    observed = observed_workload(workload, facts)
    seen = fullest.token_lengths(workload.lengths, workload.num_responses)
    lengths = replace(
        observed.lengths,
        prompt_max=max(1, math.floor(seen.prompt_mean * fullest.learned_fraction)),
        response_max=max(1, math.ceil(seen.response_mean * fullest.learned_fraction)),
    )
    prompt = math.ceil(facts.longest_prompt) or workload.lengths.prompt_max
    longest = min(observed.rollout.max_model_length, prompt + workload.lengths.response_max)
    return replace(observed, lengths=lengths, rollout=replace(observed.rollout, max_model_length=longest))


def _reward_seconds(workload: Workload, phases: Mapping[str, float]) -> float:
    """All that rewards took. `timing_s/reward` is what was still waited for after the passes beside which they were
    computed (trainer, controller/training_step.py). Where that is nothing, they took no longer than those: 0."""
    waited = phases.get(REWARD, 0.0)
    if workload.scores_first:
        return waited
    beside = sum(phases.get(name, 0.0) for name in BESIDE_REWARDS)
    is_nothing = beside > 0 and waited <= max(NOTHING_SECONDS, NOTHING_SHARE * beside)
    return 0.0 if is_nothing else waited + beside


def _step_facts(row: MetricsLine, batch_size: int) -> StepFacts:
    seconds = row[STEP_SECONDS]
    phases = {name: max(0.0, row[f"timing_s/{name}"]) for name in PHASES if f"timing_s/{name}" in row}
    # A rollout on GPUs and CPUs alike has its two parts beside the call's own time.
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
            learned_fraction=min(1.0, max(0.0, row.get("actor/trained_fraction", 1.0))),
            generated_per_learned=max(1.0, prompts / batch_size),
        ),
    )


def _largest_memory(rows: Sequence[MetricsLine]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in (item for row in rows for item in row.items()):
        short = name.removeprefix("memory/").removesuffix("_bytes_max")
        if name == f"memory/{short}_bytes_max":
            found[short] = max(found.get(short, 0.0), value)
    return found
