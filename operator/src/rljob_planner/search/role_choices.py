"""What each layout of a role costs: seconds by stage, and memory.

Seconds are those of `timing`, exactly as `timing.step` adds them up. Memory is counted only as far as it can be summed
role by role (what stays, and the most that comes on top of it): never more than `memory.phases` finds, which has the
last word on what is chosen (`mapping`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import add

from rljob_planner.constants import Constants
from rljob_planner.gpus import Cluster, Gpu
from rljob_planner.memory.phases import limit_of
from rljob_planner.memory.rollout_engine import engine_memory
from rljob_planner.memory.train_passes import micro_batch_tokens, scoring_peak, scoring_tokens, train_peak
from rljob_planner.memory.train_state import resident_bytes
from rljob_planner.placement import PlacedPool, RolloutLayout, TrainLayout
from rljob_planner.search.options import StageSeconds, is_no_worse
from rljob_planner.search.role_layouts import PoolSize, rollout_layouts, train_layouts
from rljob_planner.timing.costs import Site
from rljob_planner.timing.roles import lengths_in, rollout_cost, scoring_cost, training_cost
from rljob_planner.timing.weight_sync import sync_cost
from rljob_planner.workload import ModelOffload, Role, TrainModel, Workload

STAGES = ("weight_sync", "generate", "reward", "passes", "updates")
SYNC, GENERATION, SCORES, PASSES, UPDATES = range(5)
"""Places in a set's seconds. Scores are with the passes, unless they say what is learned from."""
NO_SECONDS: StageSeconds = (0.0,) * len(STAGES)


@dataclass(frozen=True, slots=True)
class RoleChoice:
    """A role on a layout, or actor and rollout on one each, which share their GPUs."""

    layouts: tuple[tuple[Role, TrainLayout], ...]
    rollout: RolloutLayout | None
    seconds: StageSeconds
    state: float
    """Bytes of one GPU that stay between passes."""
    active: float
    """Bytes that its own passes need beyond that, at most."""
    awake: float = 0.0
    """Bytes of the rollout engine while it generates or gets weights."""
    asleep: float = 0.0
    """The same while others work."""
    lacks: float = 0.0
    """Bytes that its cache needs more for one longest sequence."""

    @property
    def num_sequence_parallel(self) -> int:
        """Roles whose ranks share rows."""
        return sum(layout.sequence_parallel > 1 for _, layout in self.layouts)


class RoleChoices:
    """Of one job on one cluster; what was worked out once is kept."""

    def __init__(self, workload: Workload, cluster: Cluster, constants: Constants) -> None:
        self._workload = workload
        self._cluster = cluster
        self._constants = constants
        self._lengths = lengths_in(workload)
        reference = workload.models.get(Role.REF)
        self._reference_is_actor = reference is not None and reference.is_actor_without_adapters
        self.roles = tuple(role for role in workload.roles if not (role is Role.REF and self._reference_is_actor))
        """That have a place of their own: a reference that is the actor without adapters is where the actor is."""
        self._smallest: dict[tuple[Role, PoolSize], RoleChoice | None] = {}
        self._known: dict[tuple[frozenset[Role], PoolSize], list[RoleChoice]] = {}
        self._memory: dict[tuple[Role, bool, tuple[int, int, bool], int, int], tuple[float, float]] = {}

    def of(self, roles: Iterable[Role], size: PoolSize) -> list[list[RoleChoice]]:
        """Of roles that share GPUs the choices of each; of actor and rollout the pairs. Without those that another one
        of the same role beats in seconds and in memory; fastest first."""
        left = set(roles)
        units = [frozenset({Role.ACTOR, Role.ROLLOUT})] if left >= {Role.ACTOR, Role.ROLLOUT} else []
        units += [frozenset({role}) for role in self.roles if role in left and not any(role in each for each in units)]
        return [self._unit(unit, size) for unit in units]

    def with_reference(self, role: Role) -> tuple[Role, ...]:
        """The role, and the reference where it is the actor without its adapters."""
        return (role, Role.REF) if role is Role.ACTOR and self._reference_is_actor else (role,)

    def total(self, stages: StageSeconds) -> StageSeconds:
        """The longest of all sets, with what no pool does: rewards that are functions."""
        floor = self._workload.reward_seconds
        if floor <= stages[self._score_stage]:
            return stages
        return tuple(max(each, floor) if place == self._score_stage else each for place, each in enumerate(stages))

    @property
    def _score_stage(self) -> int:
        return SCORES if self._workload.scores_first else PASSES

    def _unit(self, unit: frozenset[Role], size: PoolSize) -> list[RoleChoice]:
        known = self._known.get((unit, size))
        if known is None:
            if unit == {Role.ACTOR, Role.ROLLOUT}:
                found = self._pairs(size)
            elif unit == {Role.ROLLOUT}:
                found = self._rollouts(size)
            else:
                (role,) = unit
                found = [self._trained(role, layout, size) for layout in self._train_layouts(role, size)]
            known = self._known[unit, size] = _undominated(each for each in found if self._may_fit(each, size))
        return known

    def _may_fit(self, choice: RoleChoice, size: PoolSize) -> bool:
        fits = choice.state + max(choice.awake, choice.active + choice.asleep) <= self.limit(size)
        return fits and choice.lacks == 0

    def has_layouts(self, role: Role, size: PoolSize) -> bool:
        """Whether the job's rules leave any, whatever memory it needs."""
        found = rollout_layouts(self._workload, size) if role is Role.ROLLOUT else self._train_layouts(role, size)
        return next(iter(found), None) is not None

    def smallest(self, role: Role, size: PoolSize) -> RoleChoice | None:
        """That which needs least memory, whether or not it fits; without its seconds. None where there is none."""
        key = (role, size)
        if key not in self._smallest:
            found = self._engines(size) if role is Role.ROLLOUT else self._states(role, size)
            self._smallest[key] = min(
                found, key=lambda each: each.state + each.active + each.awake + each.lacks, default=None
            )
        return self._smallest[key]

    def _engines(self, size: PoolSize) -> Iterator[RoleChoice]:
        for layout in rollout_layouts(self._workload, size):
            awake, asleep, lacks = self._engine_bytes(layout, size)
            yield RoleChoice((), layout, NO_SECONDS, 0.0, 0.0, awake, asleep, lacks)

    def _states(self, role: Role, size: PoolSize) -> Iterator[RoleChoice]:
        for layout in self._train_layouts(role, size):
            layouts = tuple((each, layout) for each in self.with_reference(role))
            yield RoleChoice(layouts, None, NO_SECONDS, *self._train_memory(role, layout, size))

    def limit(self, size: PoolSize) -> float:
        """Bytes of one GPU."""
        return limit_of(self._pool(size))

    def _train_layouts(self, role: Role, size: PoolSize) -> Iterator[TrainLayout]:
        return train_layouts(role, self._workload, size)

    def _trained(self, role: Role, layout: TrainLayout, size: PoolSize) -> RoleChoice:
        layouts = [(each, layout) for each in self.with_reference(role)]
        seconds = NO_SECONDS
        for each, _ in layouts:
            seconds = tuple(map(add, seconds, self._train_seconds(each, layout, size)))
        state, active = self._train_memory(role, layout, size)
        return RoleChoice(tuple(layouts), None, seconds, state, active)

    def _train_seconds(self, role: Role, layout: TrainLayout, size: PoolSize) -> StageSeconds:
        site = self._site(size)
        asked = (role, self._workload, self._lengths, layout, site, self._constants)
        passes, scores = scoring_cost(*asked).seconds, 0.0
        if role is Role.REWARD_MODEL:
            # A model that is done before the functions among the rewards is not waited for.
            passes, scores = 0.0, passes if passes >= self._workload.reward_seconds else 0.0
            if not self._workload.scores_first:
                passes, scores = scores, 0.0
        return (0.0, 0.0, scores, passes, training_cost(*asked).seconds)

    def _rollouts(self, size: PoolSize) -> list[RoleChoice]:
        """Apart from the actor. Weights come over the network, at the rollout's pace."""
        found: list[RoleChoice] = []
        for engine in self._engines(size):
            assert engine.rollout is not None, "an engine has a layout"
            # The layout of an actor that is elsewhere does not matter.
            sync = self._sync(TrainLayout(1, 1), engine.rollout, size, is_shared=False)
            generation = self._generation(engine.rollout, size)
            found.append(replace(engine, seconds=(sync, generation, 0.0, 0.0, 0.0)))
        return found

    def _pairs(self, size: PoolSize) -> list[RoleChoice]:
        # Of all of them: what is slow for the actor alone may hand over its weights faster.
        actors = [self._trained(Role.ACTOR, layout, size) for layout in self._train_layouts(Role.ACTOR, size)]
        found: list[RoleChoice] = []
        for engine in self._engines(size):
            assert engine.rollout is not None, "an engine has a layout"
            generation = self._generation(engine.rollout, size)
            for actor in actors:
                sync = self._sync(actor.layouts[0][1], engine.rollout, size, is_shared=True)
                seconds = (sync, generation, *actor.seconds[SCORES:])
                pair = replace(engine, layouts=actor.layouts, seconds=seconds, state=actor.state, active=actor.active)
                found.append(pair)
        return found

    def _generation(self, layout: RolloutLayout, size: PoolSize) -> float:
        return rollout_cost(self._workload, self._lengths, layout, self._site(size), self._constants).seconds

    def _sync(self, actor: TrainLayout, rollout: RolloutLayout, size: PoolSize, *, is_shared: bool) -> float:
        model, work, site = self._workload.models[Role.ACTOR], self._workload.rollout, self._site(size)
        return sync_cost(model, actor, work, rollout, site, site, self._constants, is_shared=is_shared).seconds

    def _engine_bytes(self, layout: RolloutLayout, size: PoolSize) -> tuple[float, float, float]:
        """Awake, asleep, and what the cache lacks."""
        pool = self._pool(size, layout)
        engine = engine_memory(pool, self._workload, self._constants)
        assert engine is not None, "the pool has a rollout"
        with_weights = sum(part.num_bytes for part in engine.with_weights)
        awake = max(with_weights, sum(part.num_bytes for part in engine.awake))
        return awake, sum(part.num_bytes for part in engine.asleep), engine.space.lacks

    def _train_memory(self, role: Role, layout: TrainLayout, size: PoolSize) -> tuple[float, float]:
        """What stays, and what passes need beyond that."""
        gpu = self._cluster[size.kind].gpu
        model = self._model(role, gpu)
        tokens = micro_batch_tokens(self._workload, model, layout)
        scored = scoring_tokens(self._workload, layout)
        shape = (layout.shard_size, layout.sequence_parallel, layout.num_replicas > 1)
        key = (role, gpu.is_cpu, shape, tokens, scored)
        if key not in self._memory:
            state = sum(part.num_bytes for part in resident_bytes(model, layout, has_moments=True))
            scores = role is not Role.ACTOR or self._actor_scores
            peaks = [scoring_peak(model, layout, scored, is_cpu=gpu.is_cpu)] if scores else []
            peaks += [train_peak(model, layout, tokens, is_cpu=gpu.is_cpu)] if model.is_trained else []
            factor = 1.0 if gpu.is_cpu else self._constants.allocator_factor
            self._memory[key] = state, factor * max(peak.resident + peak.transient for peak in peaks) - state
        return self._memory[key]

    @property
    def _actor_scores(self) -> bool:
        """Whether it makes passes without a backward pass."""
        return self._workload.needs_old_logprobs or self._workload.needs_whole_pass or self._reference_is_actor

    def _model(self, role: Role, gpu: Gpu) -> TrainModel:
        model = self._workload.models[role]
        return replace(model, offload=ModelOffload()) if gpu.is_cpu else model

    def _site(self, size: PoolSize) -> Site:
        return Site(self._cluster[size.kind].gpu, size.gpus_per_node)

    def _pool(self, size: PoolSize, rollout: RolloutLayout | None = None) -> PlacedPool:
        return PlacedPool("", size.nodes, size.gpus_per_node, self._cluster[size.kind].gpu, {}, rollout)


def _undominated(choices: Iterable[RoleChoice]) -> list[RoleChoice]:
    """Of choices with the same tensor parallelism those that no other one beats or equals in everything."""
    kept: list[RoleChoice] = []
    for choice in sorted(choices, key=_speed_then_size):
        if not any(_is_better(each, choice) for each in kept):
            kept.append(choice)
    return kept


def _bytes(choice: RoleChoice) -> float:
    return choice.state + choice.active + choice.awake + choice.lacks


def _speed_then_size(choice: RoleChoice) -> tuple[float, int, int]:
    return sum(choice.seconds), choice.num_sequence_parallel, -_least_shards(choice.layouts)


def _is_better(choice: RoleChoice, other: RoleChoice) -> bool:
    if choice.rollout != other.rollout:
        return False
    mine, theirs = _least_shards(choice.layouts), _least_shards(other.layouts)
    # More GPUs of a copy need no more memory of each in any phase, except that a whole copy needs no buckets.
    is_as_spread = mine >= theirs > 1 or mine == theirs
    is_as_small = choice.state <= other.state and choice.active <= other.active
    return is_as_spread and is_as_small and is_no_worse(choice.seconds, other.seconds)


def _least_shards(layouts: Sequence[tuple[Role, TrainLayout]]) -> int:
    return min((layout.shard_size for _, layout in layouts), default=1)
