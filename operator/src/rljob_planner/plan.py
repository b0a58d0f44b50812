"""A job on its GPUs, worked out: memory phase by phase, what would make it fit, and the time of it all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from rljob_planner.constants import Constants
from rljob_planner.kv_cache import engine_memory
from rljob_planner.memory.knobs import Knob, Knobs, knobs_of, worst_phase
from rljob_planner.memory.phases import phases_of
from rljob_planner.plan_types import PhaseMemory, Seconds, StepTime, Verdict, fails_from_second_step, verdict_of
from rljob_planner.timing.generation import live_context
from rljob_planner.timing.lengths import lengths_of
from rljob_planner.timing.step import step_time
from rljob_planner.workload import Placement, Role, Workload

DEFAULTS = Constants()


@dataclass(frozen=True)
class Plan:
    """What is expected of a job."""

    workload: Workload
    placement: Placement
    phases: Mapping[str, tuple[PhaseMemory, ...]]
    """By pool, in the order of a run."""
    verdict: Verdict
    worst: PhaseMemory
    """Of all pools that with least to spare."""
    knobs: tuple[Knob, ...]
    """Where it does not fit, or hardly: what makes it fit, the cheapest first, each with the seconds of its step."""
    nearest_miss: Knob | None
    """Where nothing that is tried makes it fit: what comes closest."""
    step: StepTime
    sequences_at_once: float
    """That one engine decodes side by side, on average; of Hugging Face's engine the most."""
    notes: tuple[str, ...]
    """What is to be known beside the numbers, as sentences."""

    @property
    def all_phases(self) -> tuple[PhaseMemory, ...]:
        """Of all pools."""
        return tuple(phase for each in self.phases.values() for phase in each)

    @property
    def run_seconds(self) -> Seconds:
        """Of all steps; saves and evaluations apart."""
        return self.step.total.times(self.workload.num_steps)

    @property
    def gpu_hours(self) -> Seconds:
        """Of all steps on all GPUs, those that wait, too; in hours."""
        return self.run_seconds.times(self.placement.num_gpus / 3600)


def plan_of(
    workload: Workload, placement: Placement, constants: Constants = DEFAULTS, *, with_knobs: bool = True
) -> Plan:
    """Raises KeyError where a role has no place. Knobs take the most of its time."""
    phases = {pool.name: phases_of(pool, workload, constants) for pool in placement.pools}
    everything = tuple(phase for each in phases.values() for phase in each)
    knobs = knobs_of(workload, placement, constants) if with_knobs else Knobs()
    home = placement.pool_of(Role.ROLLOUT)
    engine = engine_memory(home, workload, constants)
    assert engine is not None, "the pool of the rollout has an engine"
    assert home.rollout is not None, "and its layout"
    requests = workload.requests_per_engine(home.rollout)
    context = live_context(workload.lengths.prompt_mean, lengths_of(workload.lengths))
    at_once = min(engine.space.sequences_at_once(context), float(requests))
    return Plan(
        workload=workload,
        placement=placement,
        phases=phases,
        verdict=verdict_of(everything),
        worst=worst_phase(everything),
        knobs=_priced(knobs, constants),
        nearest_miss=knobs.nearest_miss,
        step=step_time(workload, placement, constants),
        sequences_at_once=at_once,
        notes=tuple(_notes(workload, placement, everything, requests, at_once)),
    )


def _priced(knobs: Knobs, constants: Constants) -> tuple[Knob, ...]:
    """Within those that take one change, and no other GPUs nor another kind of training, the fastest first."""

    def cost(knob: Knob, seconds: Seconds) -> tuple[bool, int, bool, float]:
        is_drastic = any(change.is_drastic for change in knob.changes)
        return is_drastic, len(knob.changes), knob.verdict is Verdict.TIGHT, seconds.likely

    priced = [(knob, step_time(knob.workload, knob.placement, constants).total) for knob in knobs.fitting]
    priced.sort(key=lambda each: cost(*each))
    return tuple(replace(knob, step_seconds=seconds) for knob, seconds in priced)


def _notes(
    workload: Workload, placement: Placement, phases: tuple[PhaseMemory, ...], requests: int, at_once: float
) -> Iterator[str]:
    if fails_from_second_step(phases):
        yield (
            "The first step would fit and later ones would not: the optimizer's moments exist from the first update "
            "on, beside the engine that wakes up. Where they are the actor's, the trainer ends such a job before it "
            "begins."
        )
    if workload.rollout.is_vllm and 0 < at_once < min(requests, workload.rollout.max_sequences):
        yield (
            f"The KV cache of an engine holds {at_once:.0f} sequences of mean length at once, of {requests} that it"
            " gets in a step: the others wait, or are preempted."
        )
    if not placement.runs_today:
        yield "This version of the trainer cannot run it: actor and rollout are not on one pool, taking turns."
    yield from workload.assumptions
