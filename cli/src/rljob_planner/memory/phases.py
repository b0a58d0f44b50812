"""Computes the memory of one GPU of a pool in each phase of a run. A table of docs/memory.md shows which state is on
the device; its rollout mode is `_in_rollout_mode` here, and its trainer mode is `_in_trainer_mode`.

Actor, reference, critic, reward model and rollout engine share one process and take turns. In the trainer, see
controller/model_roles.py, groups/fused_worker.py, workers/hybrid.py and controller/training_step.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import lru_cache

from rljob_planner.constants import Constants
from rljob_planner.kv_cache import bucket_part, engine_memory
from rljob_planner.memory.train_passes import scoring_peak, tokens_of_rank, train_peak
from rljob_planner.memory.train_state import (
    moments_part,
    parameters_part,
    trained_shard_elements,
)
from rljob_planner.model_shape import shard_elements
from rljob_planner.plan_types import Part, Parts, Phase, PhaseMemory
from rljob_planner.workload import (
    MASTER_BYTES,
    TRAIN_ROLES,
    ModelOffload,
    PlacedPool,
    Role,
    TrainLayout,
    TrainModel,
    Workload,
)

DRIVER_BYTES = 0.7 * 2**30
"""Bytes that the GPU's driver reports as memory but that no tensor can use: the first context of a process, and the
driver's own memory."""
COPY_BYTES = 12
"""Bytes per trained parameter of the copy from which a checkpoint is written: the parameter and its two moments, in
float32."""


def phases_of(pool: PlacedPool, workload: Workload, constants: Constants) -> tuple[PhaseMemory, ...]:
    """The memory of each phase that this pool has, in the order of a run."""
    return tuple(_PoolMemory(pool, workload, constants).phases())


def limit_of(pool: PlacedPool) -> float:
    """Memory that one worker may use, in bytes. On CPUs, each worker has an equal part of the node's memory."""
    if pool.gpu.is_cpu:
        return pool.gpu.memory_bytes / pool.gpus_per_node
    return pool.gpu.memory_bytes - DRIVER_BYTES


class _PoolMemory:
    """Computes the phases of one pool."""

    def __init__(self, pool: PlacedPool, workload: Workload, constants: Constants) -> None:
        self.pool, self.workload, self.constants = pool, workload, constants
        self.layouts, self.is_cpu = pool.layouts, pool.gpu.is_cpu
        models = {role: workload.models[role] for role in TRAIN_ROLES if role in pool.layouts}
        # On CPUs, offload saves nothing, because offloaded tensors stay in the same memory.
        no_offload = ModelOffload()
        self.models = {
            role: replace(each, offload=no_offload) if self.is_cpu else each for role, each in models.items()
        }
        self.engine = engine_memory(pool, workload, constants)
        self.asleep = () if self.engine is None else self.engine.asleep
        reference = workload.models.get(Role.REF)
        self.actor_has_scoring_pass = Role.ACTOR in models and (
            workload.needs_old_logprobs
            or workload.needs_mini_batch_pass
            or (reference is not None and reference.is_actor_without_adapters)
        )

    def phases(self) -> Iterator[PhaseMemory]:
        """The phases in the order of a run."""
        engine, workload = self.engine, self.workload
        if engine is not None:
            # At the start, offloaded tensors are already in host memory, there are no moments yet, and the KV cache
            # of a rollout with transformers is empty.
            awake = engine.awake if workload.rollout.is_vllm else engine.asleep
            start = (*self._in_rollout_mode(has_moments=False), *awake)
            yield self._phase(
                Phase.ENGINE_START, start, kv_cache_shortage=engine.budget.kv_cache_shortage, has_copies=False
            )
            if workload.rollout.is_vllm:
                yield self._phase(Phase.FIRST_WAKE, start, has_copies=False)
                yield self._phase(Phase.LATER_WAKE, (*self._in_rollout_mode(), *awake))
        if engine is not None or Role.ACTOR in self.models:
            # Buckets are gathered from the actor's shards, which must all be on the device, and are copied into the
            # engine's weights.
            weights = () if engine is None else engine.with_weights
            buckets = bucket_part(self.pool, workload, workload.models.get(Role.ACTOR))
            yield self._phase(Phase.SYNC, (*self._in_trainer_mode(), *weights, buckets))
        if engine is not None:
            yield self._phase(Phase.GENERATION, (*self._in_rollout_mode(), *engine.awake))
        scoring = [role for role in self.models if self._has_scoring_pass(role)]
        yield from _largest([self._pass(Phase.LOGPROBS, each, scoring_peak, workload.batch_size) for each in scoring])
        for phase, role in ((Phase.CRITIC_UPDATE, Role.CRITIC), (Phase.UPDATE, Role.ACTOR)):
            if role in self.models:
                yield self._pass(phase, role, train_peak, workload.mini_batch_size)
        # To be saved, offloaded moments are first loaded. Actor and critic are saved one after the other.
        yield from _largest([self._saving(role) for role, model in self.models.items() if model.is_trained])

    def _has_scoring_pass(self, role: Role) -> bool:
        """Whether the role runs passes without backward on this pool."""
        return self.actor_has_scoring_pass if role is Role.ACTOR else not self.models[role].is_actor_without_adapters

    def _saving(self, role: Role) -> PhaseMemory:
        """The memory while the role's model is saved."""
        state = self._state(role, fetches_parameters=True, fetches_moments=True)
        parts = (*state, *self._in_trainer_mode(except_role=role), *self.asleep)
        return self._phase(Phase.CHECKPOINT, parts, is_saving=True)

    def _pass(self, phase: Phase, role: Role, peak: Callable[..., Parts], num_prompts: int) -> PhaseMemory:
        """The memory at the peak of the role's pass over `num_prompts` prompts, together with what other models
        hold."""
        layout, reserved = self.layouts[role], self.constants.allocator_factor - 1
        tokens = tokens_of_rank(self.workload, layout, num_prompts)
        parts = list(_owned(role, peak(self.models[role], layout, tokens, is_cpu=self.is_cpu)))
        if reserved and not self.is_cpu:
            reserve = reserved * sum(part.num_bytes for part in parts)
            parts.append(Part("allocator's reserve", reserve, f"{reserved:.2f} x the memory of the pass"))
        if role is not Role.ACTOR and self.actor_has_scoring_pass:
            # After a pass without backward, FSDP2 leaves the root's parameters gathered (engines/train/engine.py).
            actor = self.models[Role.ACTOR]
            elements, element_bytes = shard_elements(actor.non_layer_units.root), actor.compute_bytes
            formula = f"{element_bytes} x {elements}"
            parts.append(Part("actor gathered parameters", float(element_bytes * elements), formula))
        return self._phase(phase, (*parts, *self._in_trainer_mode(except_role=role), *self.asleep))

    def _in_rollout_mode(self, *, has_moments: bool = True) -> Parts:
        """The state of all models that is on the device while the engine generates: what is not offloaded."""
        return tuple(part for role in self.models for part in self._state(role, has_moments=has_moments))

    def _in_trainer_mode(self, except_role: Role | None = None) -> Parts:
        """The state of all models that is on the device during passes: what is not offloaded, and the actor's
        parameters in any case. `except_role`: a role that is left out, because the memory of its pass includes its
        state."""
        others = (role for role in self.models if role is not except_role)
        return tuple(part for role in others for part in self._state(role, fetches_parameters=role is Role.ACTOR))

    def _state(
        self, role: Role, *, fetches_parameters: bool = False, has_moments: bool = True, fetches_moments: bool = False
    ) -> list[Part]:
        """Parameters and moments of a model that are on the device between passes.

        `fetches_parameters`, `fetches_moments`: they are on the device even if they are offloaded at other times.
        `has_moments`: moments exist (after the first update).
        """
        model = self.models[role]
        parameters, moments = _state_parts(role, model, self.layouts[role])
        has_parameters = fetches_parameters or not model.offload.parameters
        has_moments = has_moments and (fetches_moments or not model.offload.optimizer)
        return [*(parameters if has_parameters else ()), *(moments if has_moments else ())]

    def _phase(
        self,
        phase: Phase,
        parts: Iterable[Part],
        *,
        kv_cache_shortage: float = 0.0,
        has_copies: bool = True,
        is_saving: bool = False,
    ) -> PhaseMemory:
        on_host = self._on_this_host(has_copies=has_copies, is_saving=is_saving) if self.is_cpu else ()
        found = tuple(part for part in (*parts, *on_host) if part.num_bytes)
        return PhaseMemory(phase, self.pool.name, found, limit_of(self.pool), kv_cache_shortage)

    def _on_this_host(self, *, has_copies: bool, is_saving: bool) -> Iterable[Part]:
        """Parts that are always in host memory, so only workers on CPUs count them. `has_copies`: whether a checkpoint
        may have been saved before. `is_saving`: whether one is being saved."""
        if self.constants.process_bytes:
            yield Part("process", self.constants.process_bytes, f"without tensors ({self.constants.source})")
        every = self.workload.checkpoint_every_steps
        # Copies stay in memory after the first save; a save after the last step does not count.
        stays = has_copies and every is not None and every < self.workload.num_steps
        for role, model in self.models.items():
            num = trained_shard_elements(model, self.layouts[role])
            if (stays or is_saving) and model.is_trained:
                yield Part(f"{role} copies for checkpoints", float(COPY_BYTES * num), f"{COPY_BYTES} x {num}")
            if self.workload.models[role].offload.gradients:
                yield Part(f"{role} gradients on the host", float(MASTER_BYTES * num), f"{MASTER_BYTES} x {num}")


def _largest(phases: list[PhaseMemory]) -> list[PhaseMemory]:
    """The phase with the most bytes, in a list; empty if there are no phases."""
    return [max(phases, key=lambda phase: phase.total)] if phases else []


@lru_cache(maxsize=4096)
def _state_parts(role: Role, model: TrainModel, layout: TrainLayout) -> tuple[Parts, Parts]:
    """Parameters and moments of a model, wherever they are."""
    return _owned(role, [parameters_part(model, layout)]), _owned(role, [moments_part(model, layout)])


def _owned(role: Role, parts: Iterable[Part]) -> Parts:
    """The parts with the role before the owner: `actor parameters`."""
    return tuple(Part(f"{role} {part.owner}", part.num_bytes, part.formula) for part in parts)
