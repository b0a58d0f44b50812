"""The plan of a job on its GPUs: memory of each phase, changes that make the job fit, and time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from rljob_planner.constants import Constants
from rljob_planner.kv_cache import engine_memory
from rljob_planner.memory.host_state import host_parts
from rljob_planner.memory.job_changes import MODEL_FIELDS
from rljob_planner.memory.phases import phases_of
from rljob_planner.memory.proposals import Proposal, Proposals, find_proposals, fullest_phase
from rljob_planner.plan_types import Parts, PhaseMemory, Seconds, StepTime, Verdict, fails_from_second_step, verdict_of
from rljob_planner.timing.generation import live_context
from rljob_planner.timing.lengths import lengths_of
from rljob_planner.timing.step import step_time
from rljob_planner.workload import Placement, Role, Workload

DEFAULTS = Constants()


@dataclass(frozen=True)
class Plan:
    """The expected memory and time of a job on given GPUs."""

    workload: Workload
    placement: Placement
    phases: Mapping[str, tuple[PhaseMemory, ...]]
    """Peak memory of each phase, by the pool's name; phases are in the order of a run."""
    host_memory: Mapping[str, Parts]
    """Host memory of all workers on one node, by the pool's name; has no limit. On CPUs it is a part of the phases."""
    verdict: Verdict
    fullest_phase: PhaseMemory
    """The phase with the smallest share of free memory, of all pools."""
    proposals: tuple[Proposal, ...]
    """Changes that make the job fit or, if it is tight, give it more room; the cheapest first. Empty if the job fits
    with a tenth of its memory free, if no change is enough, or if none was searched for. Each has the seconds of a step
    of the changed job."""
    nearest_miss: Proposal | None
    """If changes were tried and none is enough: the changes that come closest."""
    step: StepTime
    sequences_at_once: float
    """How many sequences one engine decodes at the same time: with vLLM on average, with transformers at most."""
    notes: tuple[str, ...]
    """Sentences that explain or limit the numbers."""

    @property
    def all_phases(self) -> tuple[PhaseMemory, ...]:
        """The phases of all pools."""
        return tuple(phase for each in self.phases.values() for phase in each)

    @property
    def run_seconds(self) -> Seconds:
        """Seconds of all steps, without checkpoints and evaluations."""
        return self.step.total.times(self.workload.num_steps)

    @property
    def gpu_hours(self) -> Seconds:
        """Hours of all steps x all GPUs; idle GPUs count."""
        return self.run_seconds.times(self.placement.num_gpus / 3600)


def plan_of(
    workload: Workload, placement: Placement, constants: Constants = DEFAULTS, *, with_proposals: bool = True
) -> Plan:
    """The plan of a job on this placement. `with_proposals`: whether changes that make the job fit are searched for.
    The search takes most of the time.

    Raises:
        KeyError: a role of the job is in no pool.
    """
    phases = {pool.name: phases_of(pool, workload, constants) for pool in placement.pools}
    phases_of_all_pools = tuple(phase for each in phases.values() for phase in each)
    proposals = find_proposals(workload, placement, constants) if with_proposals else Proposals()
    rollout_pool = placement.pool_of(Role.ROLLOUT)
    engine = engine_memory(rollout_pool, workload, constants)
    assert engine is not None, "the pool of the rollout has an engine"
    assert rollout_pool.rollout is not None, "the pool of the rollout has its layout"
    requests = workload.requests_per_engine(rollout_pool.rollout)
    context = live_context(workload.lengths.prompt_mean, lengths_of(workload.lengths))
    at_once = min(engine.budget.sequences_at_once(context), float(requests))
    return Plan(
        workload=workload,
        placement=placement,
        phases=phases,
        host_memory={pool.name: host_parts(pool, workload, constants) for pool in placement.pools},
        verdict=verdict_of(phases_of_all_pools),
        fullest_phase=fullest_phase(phases_of_all_pools),
        proposals=_priced(proposals, constants),
        nearest_miss=proposals.nearest_miss,
        step=step_time(workload, placement, constants),
        sequences_at_once=at_once,
        notes=tuple(_notes(workload, placement, phases_of_all_pools, requests, at_once)),
    )


def _priced(proposals: Proposals, constants: Constants) -> tuple[Proposal, ...]:
    """The proposals with the seconds of a step, in the order in which they are shown: drastic ones (more nodes, LoRA)
    last; among the rest, and among the drastic ones, those with fewer changes first, then those that are not tight,
    then the fastest."""

    def cost(proposal: Proposal, seconds: Seconds) -> tuple[bool, int, bool, float]:
        is_drastic = any(change.is_drastic for change in proposal.changes)
        return is_drastic, len(proposal.changes), proposal.verdict is Verdict.TIGHT, seconds.likely

    priced = [(each, step_time(each.workload, each.placement, constants).total) for each in proposals.fitting]
    priced.sort(key=lambda each: cost(*each))
    return tuple(replace(proposal, step_seconds=seconds) for proposal, seconds in priced)


def _notes(
    workload: Workload, placement: Placement, phases: tuple[PhaseMemory, ...], requests: int, at_once: float
) -> Iterator[str]:
    if fails_from_second_step(phases):
        yield (
            "The first step would fit, but later steps would not: from the first update on, the optimizer's moments are"
            " in memory when the rollout engine wakes up. If these are the actor's moments, the trainer stops the job"
            " before its first step."
        )
    if workload.rollout.is_vllm and 0 < at_once < min(requests, workload.rollout.max_sequences):
        field = "cpuKvCache" if placement.pool_of(Role.ROLLOUT).gpu.is_cpu else "gpuMemoryUtilization"
        yield (
            f"The KV cache of one rollout engine holds {at_once:.0f} sequences of mean length, but the engine gets"
            f" {requests} sequences per step: the others wait or are preempted. To hold more, increase"
            f" spec.training.rollout.{field}."
        )
    if not placement.is_supported:
        yield (
            "This version of the trainer cannot run this placement: actor and rollout must be on the same pool and take"
            " turns."
        )
    for role, model in workload.models.items():
        if model.chooses_checkpointing:
            chosen, size = "Always" if model.checkpoints_activations else "Never", model.shape.num_parameters
            shown = f"{size / 1e9:.2f} billion" if size >= 1e9 else f"{size / 1e6:.2f} million"
            yield (
                f"{MODEL_FIELDS[role]}.gradientCheckpointing: Auto is {chosen} for this model, with {shown} parameters"
                f" on {'CPUs' if placement.pool_of(role).gpu.is_cpu else 'GPUs'}."
                if not model.checkpoints_for_interval
                else f"{MODEL_FIELDS[role]}.gradientCheckpointing: Auto is {chosen}, because"
                f" gradientCheckpointingEveryNthLayer is {model.checkpoints_every_nth_layer}."
            )
    yield from workload.assumptions
