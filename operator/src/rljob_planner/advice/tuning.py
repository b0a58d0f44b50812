"""What to change in a job so that its steps get shorter: every change is worked out anew by the model that the plan is
from, and only those that help, and fit, are named. The sections are those of docs/tuning.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from rljob_planner.advice.comparison import ComparedMemory, ComparedTime
from rljob_planner.advice.run_facts import RunFacts
from rljob_planner.constants import Constants
from rljob_planner.memory.changes import Change, Changed, faster_jobs, is_allowed
from rljob_planner.memory.knobs import all_phases, worst_phase
from rljob_planner.plan import Plan
from rljob_planner.plan_types import PhaseMemory, Seconds, StepTime, Verdict, verdict_of
from rljob_planner.timing.step import step_time
from rljob_planner.workload import PlacedPool, Placement, Role, Workload

LEAST_GAIN = 0.01
"""Of a step; less is no advice."""
LEAST_GAIN_AT_A_PRICE = 0.03
"""Of what changes learning, or takes more GPUs."""
MOST_TOGETHER = 4
NEARLY_AS_GOOD = 0.01
"""Of a step: of two values of a field that are so near each other the one nearer to the present value is named."""


@dataclass(frozen=True)
class Advice:
    """One field, and what comes of it."""

    changed: Changed
    """The field, and the job with it."""
    step: Seconds
    """With it."""
    gain: float
    """Seconds of a step, by the likely ends."""
    share: float
    """Of the step without it."""
    phases: tuple[tuple[str, float], ...]
    """Which phases become shorter, or longer (below 0), by how many seconds; the largest first."""
    worst: PhaseMemory
    """With least to spare then."""
    verdict: Verdict
    more_gpus: int

    @property
    def change(self) -> Change:
        """The field."""
        return self.changed.change

    @property
    def is_free(self) -> bool:
        """Whether it costs nothing beside memory."""
        return not self.changed.changes_learning and not self.more_gpus


class Finding(NamedTuple):
    """What the run shows beside phases and memory, as a sentence; with the section that says what to do."""

    text: str
    section: str


@dataclass(frozen=True)
class RunReport:
    """Of one run."""

    name: str
    """Its folder."""
    state: str
    """Where it is, as its folder says; empty where that is not known."""
    constants: str
    """Where the constants of the prediction are from."""
    facts: RunFacts
    plan: Plan
    """Of the job with the lengths that the run had."""
    times: tuple[ComparedTime, ...]
    memory: tuple[ComparedMemory, ...]
    findings: tuple[Finding, ...]
    advice: tuple[Advice, ...]
    """Each for itself."""
    together: tuple[Advice, ...]
    """One after the other."""


def advice_of(workload: Workload, placement: Placement, constants: Constants) -> tuple[Advice, ...]:
    """The best value of each field that helps, the largest gain first; what changes learning, or takes more GPUs, comes
    after all others."""
    now = step_time(workload, placement, constants)
    verdict = verdict_of(all_phases(workload, placement, constants))
    ladders = (*faster_jobs(workload, placement), *_own_pools(workload, placement))
    found = []
    for ladder in ladders:
        advice = [_advice(each, placement, now, constants) for each in ladder]
        if (best := _best(advice, now, verdict)) is not None:
            found.append(best)
    return tuple(sorted(found, key=lambda each: (not each.is_free, -each.gain)))


def together(workload: Workload, placement: Placement, constants: Constants) -> tuple[Advice, ...]:
    """Changes that cost nothing beside memory, one after the other: each the best one after those before it, its gain
    beside these. At most MOST_TOGETHER, and no field twice."""
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


def _own_pools(workload: Workload, placement: Placement) -> Iterator[tuple[Changed, ...]]:
    """A model that scores or learns beside the actor, on another pool with as many GPUs as one node has; its layout
    stays as the job says it."""
    home = placement.pool_of(Role.ACTOR)
    num_gpus, taken = home.gpus_per_node, {pool.name for pool in placement.pools}
    for role in (Role.REF, Role.CRITIC, Role.REWARD_MODEL):
        name, now = role.lower(), home.layouts.get(role)
        if now is None or workload.models[role].is_actor_without_adapters or name in taken:
            continue
        keeps = now.keeps_shard_size or now.num_replicas > 1
        layout = replace(now, num_gpus=num_gpus, shard_size=now.shard_size if keeps else num_gpus)
        pool = PlacedPool(name, 1, num_gpus, home.gpu, {role: layout})
        divides = num_gpus % layout.shard_size == num_gpus % layout.sequence_parallel == 0
        if divides and is_allowed(workload, role, layout):
            rest = {each: other for each, other in home.layouts.items() if each is not role}
            left = placement.with_pool(home, replace(home, layouts=rest))
            change = Change(f"spec.roles.{role}.pool", pool.name, home.name)
            yield (Changed(change, workload, replace(left, pools=(*left.pools, pool)), "pools of their own"),)


def _advice(changed: Changed, placement: Placement, now: StepTime, constants: Constants) -> Advice:
    step = step_time(changed.workload, changed.placement, constants)
    phases = all_phases(changed.workload, changed.placement, constants)
    before, after = _waits(now), _waits(step)
    saved = {name: before.get(name, 0.0) - after.get(name, 0.0) for name in {**before, **after}}
    told = sorted(((name, each) for name, each in saved.items() if abs(each) > 1e-9), key=lambda item: -abs(item[1]))
    gain = now.total.likely - step.total.likely
    return Advice(
        changed=changed,
        step=step.total,
        gain=gain,
        share=gain / now.total.likely if now.total.likely > 0 else 0.0,
        phases=tuple(told),
        worst=worst_phase(phases),
        verdict=verdict_of(phases),
        more_gpus=changed.placement.num_gpus - placement.num_gpus,
    )


def _waits(step: StepTime) -> dict[str, float]:
    return {phase.name: phase.waited.likely for phase in step.phases}


def _best(ladder: Sequence[Advice], now: StepTime, verdict: Verdict) -> Advice | None:
    """The first value that is nearly as good as the best one that fits (of a job that does not fit by the model, though
    it has run: that needs no more than this)."""
    allowed = [each for each in ladder if each.verdict is not Verdict.TOO_LARGE or verdict is Verdict.TOO_LARGE]
    helpful = [each for each in allowed if each.share >= (LEAST_GAIN if each.is_free else LEAST_GAIN_AT_A_PRICE)]
    if not helpful:
        return None
    most = max(each.gain for each in helpful)
    return next(each for each in helpful if each.gain >= most - NEARLY_AS_GOOD * now.total.likely)


def findings_of(facts: RunFacts, plan: Plan) -> tuple[Finding, ...]:
    """What the run shows beside the phases and lengths that are printed. `plan` has the run's lengths."""
    found, lengths = list[Finding](), facts.lengths
    if facts.token_imbalance is not None and facts.token_imbalance > 1.1:
        text = f"the busiest worker updates with {facts.token_imbalance:.2f} times the mean number of tokens, and the"
        found.append(Finding(f"{text} others wait for it (perf/token_imbalance)", "balance"))
    if lengths.learned_fraction < 0.8:
        text = f"{1 - lengths.learned_fraction:.0%} of the responses are not trained on (actor/trained_fraction)"
        found.append(Finding(text, "responses that teach nothing"))
    if lengths.generated_per_learned > 1.2:
        text = f"dynamic sampling generates {lengths.generated_per_learned:.1f} times the responses of a batch"
        found.append(Finding(f"{text} (dynamic_sampling/prompts)", "responses that teach nothing"))
    layout = plan.placement.pool_of(Role.ROLLOUT).rollout
    own = plan.workload.num_requests / layout.num_engines if layout is not None else 0.0
    limit = min(own, plan.workload.rollout.max_sequences)
    if plan.workload.rollout.is_vllm and 0 < plan.sequences_at_once < limit:
        text = f"the KV cache holds about {plan.sequences_at_once:,.0f} of the {limit:,.0f} sequences that an engine"
        found.append(Finding(f"{text} could decode at once: others wait, or are preempted", "memory of the engine"))
    return tuple(found)
