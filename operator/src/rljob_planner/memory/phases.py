"""What is on one GPU of a pool in each phase of a run: the table of docs/memory.md with numbers in it.

Read it beside that table: `_in_rollout_mode` and `_in_trainer_mode` are its two kinds of rows. Actor, reference,
critic, reward model and engine share one process (the trainer's controller/model_roles.py, groups/fused_worker.py) and
take turns (workers/hybrid.py, controller/training_step.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from rljob_planner.constants import Constants
from rljob_planner.kv_cache import EngineMemory, bucket_part, engine_memory
from rljob_planner.memory.train_passes import micro_batch_tokens, scoring_peak, scoring_tokens, train_peak
from rljob_planner.memory.train_state import (
    MASTER_BYTES,
    gradient_bytes,
    num_elements,
    resident_bytes,
    root_tensors,
    trained_shard_elements,
)
from rljob_planner.plan_types import Part, Peak, Phase, PhaseMemory
from rljob_planner.workload import (
    TRAIN_ROLES,
    EngineKind,
    ModelOffload,
    PlacedPool,
    Role,
    TrainLayout,
    TrainModel,
    Workload,
)

DRIVER_BYTES = 0.7 * 2**30
"""Of what a driver reports nobody gets about so much (a process's first context, what the driver itself takes)."""
COPY_BYTES = 12
"""Of each trained number a checkpoint is written from: itself and two moments, in 32 bits."""


def phases_of(pool: PlacedPool, workload: Workload, constants: Constants) -> tuple[PhaseMemory, ...]:
    """Those that this pool has, in the order of a run."""
    found = _PoolMemory(pool, workload, constants, engine_memory(pool, workload, constants))
    phases = (
        found.engine_start(),
        found.wake(Phase.FIRST_WAKE, has_moments=False),
        found.wake(Phase.LATER_WAKE, has_moments=True),
        found.sync(),
        found.generation(),
        found.logprobs(),
        found.critic_update(),
        found.update(),
        found.checkpoint(),
    )
    return tuple(phase for phase in phases if phase is not None)


def limit_of(pool: PlacedPool) -> float:
    """Of one worker. On CPUs the workers of a node share its memory."""
    if pool.gpu.is_cpu:
        return pool.gpu.memory_bytes / pool.gpus_per_node
    return pool.gpu.memory_bytes - DRIVER_BYTES


@dataclass(frozen=True)
class _PoolMemory:
    pool: PlacedPool
    workload: Workload
    constants: Constants
    engine: EngineMemory | None

    def engine_start(self) -> PhaseMemory | None:
        """What is offloaded has left the device; there are no moments."""
        if self.engine is None:
            return None
        is_vllm = self.workload.rollout.engine is EngineKind.VLLM
        engine = self.engine.awake if is_vllm else self.engine.asleep
        parts = (*self._in_rollout_mode(has_moments=False), *engine)
        return self._phase(Phase.ENGINE_START, parts, lacks=self.engine.space.lacks, has_copies=False)

    def wake(self, phase: Phase, *, has_moments: bool) -> PhaseMemory | None:
        """The engine's cache has come; transformers has none."""
        if self.engine is None or self.workload.rollout.engine is not EngineKind.VLLM:
            return None
        parts = (*self._in_rollout_mode(has_moments=has_moments), *self.engine.awake)
        return self._phase(phase, parts, has_copies=has_moments)

    def sync(self) -> PhaseMemory | None:
        """Buckets go from the actor's shards, which are all there, to the engine's weights."""
        if self.engine is None and Role.ACTOR not in self.pool.layouts:
            return None
        actor = self.workload.models.get(Role.ACTOR)
        engine = () if self.engine is None else self.engine.with_weights
        parts = (*self._in_trainer_mode(), *engine, bucket_part(self.pool, self.workload, actor))
        return self._phase(Phase.SYNC, parts)

    def generation(self) -> PhaseMemory | None:
        if self.engine is None:
            return None
        return self._phase(Phase.GENERATION, (*self._in_rollout_mode(has_moments=True), *self.engine.awake))

    def logprobs(self) -> PhaseMemory | None:
        """The largest of the passes without a backward: by the actor, the reference, the critic, the reward model."""
        found = [self._pass(Phase.LOGPROBS, role, self._scoring_peak(role)) for role in self._scoring_roles()]
        return max(found, key=lambda phase: phase.total, default=None)

    def critic_update(self) -> PhaseMemory | None:
        return self._update(Phase.CRITIC_UPDATE, Role.CRITIC)

    def update(self) -> PhaseMemory | None:
        return self._update(Phase.UPDATE, Role.ACTOR)

    def checkpoint(self) -> PhaseMemory | None:
        """Moments that are offloaded come to be copied; actor and critic one after the other."""
        trained = [role for role, model in self._models() if model.is_trained]
        found = [self._phase(Phase.CHECKPOINT, self._saved(role), is_saving=True) for role in trained]
        return max(found, key=lambda phase: phase.total, default=None)

    def _saved(self, role: Role) -> Iterable[Part]:
        state = self._state(role, has_parameters=True, fetches_moments=True)
        return (*state, *self._in_trainer_mode(but=role), *self._asleep)

    def _update(self, phase: Phase, role: Role) -> PhaseMemory | None:
        if role not in self.pool.layouts:
            return None
        model, layout = self._model(role), self.pool.layouts[role]
        tokens = micro_batch_tokens(self.workload, model, layout)
        return self._pass(phase, role, _train_peak(model, layout, tokens, is_cpu=self.pool.gpu.is_cpu))

    def _pass(self, phase: Phase, role: Role, peak: Peak) -> PhaseMemory:
        own = list(_owned(role, peak.parts))
        reserve = (self.constants.allocator_factor - 1) * (peak.resident + peak.transient)
        if reserve and not self.pool.gpu.is_cpu:
            own.append(Part("allocator's reserve", reserve, f"{self.constants.allocator_factor - 1:.2f} of these"))
        whole = self._gathered_actor() if role is not Role.ACTOR else ()
        return self._phase(phase, (*own, *whole, *self._in_trainer_mode(but=role), *self._asleep))

    def _scoring_peak(self, role: Role) -> Peak:
        layout = self.pool.layouts[role]
        tokens = scoring_tokens(self.workload, layout)
        return _scoring_peak(self._model(role), layout, tokens, is_cpu=self.pool.gpu.is_cpu)

    def _scoring_roles(self) -> list[Role]:
        """Those that make passes without a backward here."""
        roles = [role for role, model in self._models() if not model.is_actor_without_adapters]
        if Role.ACTOR in roles and not self._actor_scores():
            roles.remove(Role.ACTOR)
        return roles

    def _actor_scores(self) -> bool:
        reference = self.workload.models.get(Role.REF)
        is_reference = reference is not None and reference.is_actor_without_adapters
        return self.workload.needs_old_logprobs or self.workload.needs_whole_pass or is_reference

    def _gathered_actor(self) -> tuple[Part, ...]:
        """After passes without a backward FSDP2 leaves what is not in a layer whole (engines/train/engine.py)."""
        if Role.ACTOR not in self.pool.layouts or not self._actor_scores():
            return ()
        model = self._model(Role.ACTOR)
        num = num_elements(root_tensors(model))
        return (Part("actor gathered parameters", float(model.compute_bytes * num), f"{model.compute_bytes} x {num}"),)

    def _in_rollout_mode(self, *, has_moments: bool) -> tuple[Part, ...]:
        """Of all models here, what does not leave the device."""
        return tuple(part for role, _ in self._models() for part in self._state(role, has_moments=has_moments))

    def _in_trainer_mode(self, but: Role | None = None) -> tuple[Part, ...]:
        """The same with the actor's parameters; without one model, which does something."""
        return tuple(
            part
            for role, _ in self._models()
            if role is not but
            for part in self._state(role, has_parameters=role is Role.ACTOR)
        )

    def _state(
        self, role: Role, *, has_parameters: bool = False, has_moments: bool = True, fetches_moments: bool = False
    ) -> list[Part]:
        """What of a model's state is on the device between passes. `has_parameters`: they are there even if they are
        offloaded; `fetches_moments`: likewise. `has_moments`: there are any."""
        model, layout = self._model(role), self.pool.layouts[role]
        parameters, moments = _state_parts(role, model, layout)
        has_parameters = has_parameters or not model.offload.parameters
        has_moments = has_moments and (fetches_moments or not model.offload.optimizer)
        return [*(parameters if has_parameters else ()), *(moments if has_moments else ())]

    @property
    def _asleep(self) -> tuple[Part, ...]:
        return () if self.engine is None else self.engine.asleep

    def _models(self) -> list[tuple[Role, TrainModel]]:
        return [(role, self._model(role)) for role in TRAIN_ROLES if role in self.pool.layouts]

    def _model(self, role: Role) -> TrainModel:
        """As it is here: on CPUs what is offloaded is in the same memory."""
        model = self.workload.models[role]
        return replace(model, offload=ModelOffload()) if self.pool.gpu.is_cpu else model

    def _phase(
        self,
        phase: Phase,
        parts: Iterable[Part],
        *,
        lacks: float = 0.0,
        has_copies: bool = True,
        is_saving: bool = False,
    ) -> PhaseMemory:
        beside = self._on_this_host(has_copies=has_copies, is_saving=is_saving) if self.pool.gpu.is_cpu else ()
        found = tuple(part for part in (*parts, *beside) if part.num_bytes)
        return PhaseMemory(phase, self.pool.name, found, limit_of(self.pool), lacks)

    def _on_this_host(self, *, has_copies: bool, is_saving: bool) -> Iterable[Part]:
        """What a GPU's worker has in the host's memory takes the same memory on CPUs."""
        if self.constants.process_bytes:
            yield Part("process", self.constants.process_bytes, f"without tensors, by {self.constants.source}")
        every = self.workload.checkpoint_every_steps
        stays = has_copies and every is not None and every < self.workload.num_steps
        for role, model in self._models():
            layout = self.pool.layouts[role]
            if (stays or is_saving) and model.is_trained:
                num = trained_shard_elements(model, layout)
                yield Part(f"{role} copies for checkpoints", float(COPY_BYTES * num), f"{COPY_BYTES} x {num}")
            if self.workload.models[role].offload.gradients:
                num_bytes = gradient_bytes(model, layout)
                formula = f"{MASTER_BYTES} x {num_bytes // MASTER_BYTES}"
                yield Part(f"{role} gradients on the host", float(num_bytes), formula)


# Whoever looks for a better job asks for many that differ in one thing.
_train_peak = lru_cache(maxsize=4096)(train_peak)
_scoring_peak = lru_cache(maxsize=4096)(scoring_peak)


@lru_cache(maxsize=4096)
def _state_parts(role: Role, model: TrainModel, layout: TrainLayout) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
    """Parameters and moments, wherever they are."""
    everything = resident_bytes(replace(model, offload=ModelOffload()), layout, has_moments=True)
    parameters, moments = (
        tuple(part for part in everything if part.owner == name) for name in ("parameters", "moments")
    )
    return _owned(role, parameters), _owned(role, moments)


def _owned(role: Role, parts: Iterable[Part]) -> tuple[Part, ...]:
    return tuple(Part(f"{role} {part.owner}", part.num_bytes, part.formula) for part in parts)
