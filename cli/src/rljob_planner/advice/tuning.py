"""Suggests changes that make the steps of a job shorter. Memory and time of each changed job are computed with the
models of the plan. Only changes that make steps shorter and fit into memory are suggested. docs/tuning.md has a section
about each change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from rljob_planner.advice.comparison import ComparedMemory, ComparedTime
from rljob_planner.advice.run_facts import RunFacts
from rljob_planner.constants import Constants
from rljob_planner.memory.job_changes import Change, ChangedJob, faster_jobs, is_allowed
from rljob_planner.memory.proposals import all_phases, fullest_phase
from rljob_planner.plan import Plan
from rljob_planner.plan_types import PhaseMemory, Seconds, StepTime, Verdict, verdict_of
from rljob_planner.timing.step import step_time
from rljob_planner.workload import PlacedPool, Placement, Role, Workload

LEAST_GAIN = 0.01
"""A change is suggested if its gain is at least this share of a step."""
LEAST_GAIN_AT_A_PRICE = 0.03
"""The same for changes that affect learning, or that need more GPUs."""
MOST_TOGETHER = 4
"""The largest number of changes that are combined."""
NEARLY_AS_GOOD = 0.01
"""If the gains of two values of a field differ by less than this share of a step, the value nearer to the present one
is suggested."""


@dataclass(frozen=True)
class Advice:
    """A suggested change of one field, and its effect."""

    changed: ChangedJob
    """The change, and the job with it."""
    step: Seconds
    """Seconds of a step with the change."""
    gain: float
    """By how many seconds a step becomes shorter. Computed from likely values."""
    share: float
    """The gain as a share of the step without the change."""
    phases: tuple[tuple[str, float], ...]
    """By how many seconds each phase becomes shorter (negative: longer). The largest come first."""
    fullest_phase: PhaseMemory
    """The phase with the smallest share of free memory, with the change."""
    verdict: Verdict
    more_gpus: int
    """How many GPUs the changed job needs in addition."""

    @property
    def change(self) -> Change:
        """The change of the field."""
        return self.changed.change

    @property
    def is_free(self) -> bool:
        """Whether the change costs only memory: it does not affect learning and needs no additional GPUs."""
        return not self.changed.changes_training and not self.more_gpus


class Finding(NamedTuple):
    """A sentence about something that the run shows, and the section of docs/tuning.md that says what to do."""

    text: str
    section: str


@dataclass(frozen=True)
class RunReport:
    """The comparison of one run with its plan, and suggestions."""

    name: str
    """The run's folder."""
    state: str
    """Progress and phase of the run, from its folder: `step 12 of 12, Complete`. Empty if unknown."""
    constants: str
    """Source of the constants: `defaults`, or the runs of a profile."""
    facts: RunFacts
    plan: Plan
    """The plan of the job with the lengths of the run."""
    times: tuple[ComparedTime, ...]
    memory: tuple[ComparedMemory, ...]
    findings: tuple[Finding, ...]
    advice: tuple[Advice, ...]
    """Suggested changes. The effect of each is computed without the others."""
    together: tuple[Advice, ...]
    """Changes that are combined. The effect of each is computed with those before it."""


def advice_of(workload: Workload, placement: Placement, constants: Constants) -> tuple[Advice, ...]:
    """For each field that can make steps shorter, its best value. The largest gains come first; changes that affect
    learning, or that need more GPUs, come last."""
    now = step_time(workload, placement, constants)
    verdict = verdict_of(all_phases(workload, placement, constants))
    changes_by_field = (*faster_jobs(workload, placement), *_separate_pools(workload, placement))
    found = []
    for changes in changes_by_field:
        advice = [_advice(each, placement, now, constants) for each in changes]
        if (best := _best(advice, now, verdict)) is not None:
            found.append(best)
    return tuple(sorted(found, key=lambda each: (not each.is_free, -each.gain)))


def together(workload: Workload, placement: Placement, constants: Constants) -> tuple[Advice, ...]:
    """Combines at most MOST_TOGETHER changes that cost only memory, each of another field. Each is the best change of
    the job that already has the changes before it."""
    found: list[Advice] = []
    while len(found) < MOST_TOGETHER:
        changed = {each.change.field for each in found}
        advice = advice_of(workload, placement, constants)
        free = [each for each in advice if each.is_free and each.change.field not in changed]
        if not free:
            break
        found.append(free[0])
        workload, placement = free[0].changed.workload, free[0].changed.placement
    return tuple(found)


def _separate_pools(workload: Workload, placement: Placement) -> Iterator[tuple[ChangedJob, ...]]:
    """Jobs in which a frozen model or the critic moves from the actor's pool to a separate pool of one node. The model
    keeps a shard size and a sequence parallelism that the job file sets."""
    actor_pool = placement.pool_of(Role.ACTOR)
    num_gpus, taken = actor_pool.gpus_per_node, {pool.name for pool in placement.pools}
    for role in (Role.REF, Role.CRITIC, Role.REWARD_MODEL):
        name, now = role.lower(), actor_pool.layouts.get(role)
        if now is None or workload.models[role].is_actor_without_adapters or name in taken:
            continue
        layout = now.resized(num_gpus)
        pool = PlacedPool(name, 1, num_gpus, actor_pool.gpu, {role: layout})
        divides = num_gpus % layout.shard_size == num_gpus % layout.sequence_parallel == 0
        if divides and is_allowed(workload, role, layout):
            other_layouts = {each: other for each, other in actor_pool.layouts.items() if each is not role}
            remaining = placement.with_pool(actor_pool, replace(actor_pool, layouts=other_layouts))
            change = Change(f"spec.roles.{role}.pool", pool.name, actor_pool.name)
            yield (ChangedJob(change, workload, replace(remaining, pools=(*remaining.pools, pool)), "separate pools"),)


def _advice(changed: ChangedJob, placement: Placement, now: StepTime, constants: Constants) -> Advice:
    step = step_time(changed.workload, changed.placement, constants)
    phases = all_phases(changed.workload, changed.placement, constants)
    before, after = _waits(now), _waits(step)
    saved = {name: before.get(name, 0.0) - after.get(name, 0.0) for name in {**before, **after}}
    changed_phases = ((name, each) for name, each in saved.items() if abs(each) > 1e-9)
    gain = now.total.likely - step.total.likely
    return Advice(
        changed=changed,
        step=step.total,
        gain=gain,
        share=gain / now.total.likely if now.total.likely > 0 else 0.0,
        phases=tuple(sorted(changed_phases, key=lambda item: -abs(item[1]))),
        fullest_phase=fullest_phase(phases),
        verdict=verdict_of(phases),
        more_gpus=changed.placement.num_gpus - placement.num_gpus,
    )


def _waits(step: StepTime) -> dict[str, float]:
    """By phase: the likely seconds that the controller waits for it."""
    return {phase.name: phase.waited.likely for phase in step.phases}


def _best(changes: Sequence[Advice], now: StepTime, verdict: Verdict) -> Advice | None:
    """Of these changes of one field, ordered by their distance from the present value: the first that is nearly as good
    as the best one that fits. None if none gains enough. If the job itself does not fit by the planner's formulas
    (although it has run), changes need not fit either."""
    allowed = [each for each in changes if each.verdict is not Verdict.TOO_LARGE or verdict is Verdict.TOO_LARGE]
    helpful = [each for each in allowed if each.share >= (LEAST_GAIN if each.is_free else LEAST_GAIN_AT_A_PRICE)]
    if not helpful:
        return None
    most = max(each.gain for each in helpful)
    return next(each for each in helpful if each.gain >= most - NEARLY_AS_GOOD * now.total.likely)


def findings_of(facts: RunFacts, plan: Plan) -> tuple[Finding, ...]:
    """What the run shows besides seconds of phases and lengths. `plan`: the plan with the lengths of the run."""
    found, lengths = list[Finding](), facts.lengths
    if facts.micro_batch_imbalance is not None and facts.micro_batch_imbalance > 1.1:
        text = f"the most expensive micro-batches cost {facts.micro_batch_imbalance:.2f} times the mean, and other"
        found.append(Finding(f"{text} workers wait for them (perf/micro_batch_imbalance)", "balance"))
    if lengths.trained_fraction < 0.8:
        text = f"{1 - lengths.trained_fraction:.0%} of the responses are not trained on (actor/trained_fraction)"
        found.append(Finding(text, "responses that are not trained on"))
    if lengths.generation_factor > 1.2:
        text = f"dynamic sampling generates {lengths.generation_factor:.1f} times the responses of a batch"
        found.append(Finding(f"{text} (dynamic_sampling/prompts)", "responses that are not trained on"))
    layout = plan.placement.pool_of(Role.ROLLOUT).rollout
    per_engine = plan.workload.num_requests / layout.num_engines if layout is not None else 0.0
    limit = min(per_engine, plan.workload.rollout.max_sequences)
    if plan.workload.rollout.is_vllm and 0 < plan.sequences_at_once < limit:
        text = f"an engine could decode {limit:,.0f} sequences at the same time, but the KV cache holds only about"
        text += f" {plan.sequences_at_once:,.0f}: the others wait or are preempted"
        found.append(Finding(text, "memory of the engine"))
    return tuple(found)
