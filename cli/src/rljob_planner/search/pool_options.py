"""The options for roles that share a pool: layouts whose memory fits, and their seconds in each stage of a step.

A pool has 1, 2, 3, 4, 6, 8, 12, 16, ... whole nodes of one type, or all nodes of the type. The GPUs of tensor or
sequence parallelism are always on one node.

A stage is a part of a step that all pools start together. It takes as long as its slowest pool. On one pool the roles
of a stage take turns. Seconds are computed by `timing.step`, memory by `memory.phases`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from operator import le

from rljob_planner.constants import Constants
from rljob_planner.gpus import Cluster, Gpu
from rljob_planner.memory.job_changes import divisors, is_allowed
from rljob_planner.memory.phases import phases_of
from rljob_planner.plan_types import PhaseMemory
from rljob_planner.timing.communication import NodeType
from rljob_planner.timing.lengths import lengths_of
from rljob_planner.timing.step import REWARD, StageSeconds, pool_costs, stage_seconds, total_seconds
from rljob_planner.workload import (
    PlacedPool,
    Role,
    RolloutLayout,
    Schedule,
    TrainLayout,
    Workload,
)

NO_SECONDS: StageSeconds = (0.0,) * 5
MOST_PARALLEL = 8
"""The largest tensor or sequence parallelism that is tried."""


@dataclass(frozen=True, slots=True)
class PoolSize:
    """A number of whole nodes of one type."""

    kind: int
    """The index of the node group in the cluster."""
    nodes: int
    gpus_per_node: int

    @property
    def num_gpus(self) -> int:
        """GPUs of all nodes."""
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True, slots=True)
class RoleChoice:
    """A layout of one role, computed as if the role were alone on the pool. Actor and rollout on the same GPUs are one
    choice."""

    layouts: Mapping[Role, TrainLayout]
    rollout: RolloutLayout | None
    phases: tuple[PhaseMemory, ...]
    seconds: StageSeconds = NO_SECONDS
    """Seconds in each stage of a step."""

    @property
    def most_bytes(self) -> float:
        """The largest memory that a phase needs on one GPU, including the bytes that the KV cache lacks."""
        return max(phase.total + phase.kv_cache_shortage for phase in self.phases)

    @property
    def lacking_bytes(self) -> float:
        """Bytes that are missing on one GPU, summed over the phases that do not fit."""
        return sum(max(0.0, -phase.spare) for phase in self.phases)

    @property
    def num_sequence_parallel(self) -> int:
        """Roles with sequence parallelism."""
        return sum(layout.sequence_parallel > 1 for layout in self.layouts.values())

    @property
    def costs(self) -> tuple[float, ...]:
        """Numbers by which layouts are compared; lower is better. They are: minus the shard size of each role, the
        number of roles with sequence parallelism, the seconds of each stage, the memory of each phase."""
        shards = (-layout.shard_size for layout in self.layouts.values())
        return (*shards, self.num_sequence_parallel, *self.seconds, *(phase.total for phase in self.phases))


@dataclass(frozen=True, slots=True)
class PoolOption:
    """A layout for each of the roles that share a pool."""

    roles: tuple[Role, ...]
    size: PoolSize
    choices: tuple[RoleChoice, ...]
    seconds: StageSeconds
    """Seconds in each stage of a step. The roles of the pool take turns, so their seconds are added."""


class SearchSpace:
    """Finds the options of one job on one cluster. Results are cached."""

    def __init__(self, workload: Workload, cluster: Cluster, constants: Constants) -> None:
        self.workload = workload
        self.cluster = cluster
        self.constants = constants
        self.sizes = pool_sizes(cluster)
        reference = workload.models.get(Role.REF)
        self._reference_is_actor = reference is not None and reference.is_actor_without_adapters
        self.roles = tuple(role for role in workload.roles if role is not Role.REF or not self._reference_is_actor)
        """Roles that need a pool. A reference that is the actor's model is not one of them: it runs on the actor's
        GPUs."""
        self._lengths = lengths_of(workload.lengths)
        self._of_functions = stage_seconds({REWARD: workload.reward_seconds}, workload)
        self.fastest = cache(self._fastest)
        self.choices = cache(self._choices)
        self._fitting = cache(self._fitting_choices)

    def _fastest(self, roles: tuple[Role, ...], size: PoolSize) -> list[PoolOption]:
        """The options of these roles that fit. An option is left out if another one is at least as fast in every
        stage."""
        kept: list[PoolOption] = []
        combinations = product(*(self._fitting(unit, size) for unit in units_of(roles)))
        options = [_option(roles, size, each) for each in combinations]
        for option in sorted(options, key=lambda each: sum(each.seconds)):
            if not any(is_no_worse(each.seconds, option.seconds) for each in kept) and self._fits(option):
                kept.append(option)
        return kept

    def smallest(self, roles: tuple[Role, ...], size: PoolSize) -> PoolOption | None:
        """The option that needs the least memory, even if it does not fit. Its seconds are not computed. None if the
        contract accepts no layout of one of the roles."""
        units = [self.choices(unit, size) for unit in units_of(roles)]
        if not all(units):
            return None
        return _option(
            roles, size, [min(unit, key=lambda each: (each.most_bytes, each.lacking_bytes)) for unit in units]
        )

    def simpler_or_smaller(self, option: PoolOption, index: int) -> Iterator[PoolOption]:
        """The same option with another layout for the choice at `index`: one with fewer sequence-parallel roles, or
        with as many and less memory. The rollout keeps its layout. The options with the fewest such roles come first,
        then those that need the least memory."""

        def burden(choice: RoleChoice) -> tuple[int, float]:
            return choice.num_sequence_parallel, choice.most_bytes

        now = option.choices[index]
        for choice in sorted(self._fitting(units_of(option.roles)[index], option.size), key=burden):
            if choice.rollout == now.rollout and burden(choice) < burden(now):
                choices = (*option.choices[:index], choice, *option.choices[index + 1 :])
                other = _option(option.roles, option.size, choices)
                if self._fits(other):
                    yield other

    def _fits(self, option: PoolOption) -> bool:
        """Whether the memory of these choices together is enough. A single choice was already checked alone."""
        return len(option.choices) == 1 or all(phase.spare >= 0 for phase in self.phases(option))

    def phases(self, option: PoolOption) -> tuple[PhaseMemory, ...]:
        """The memory of a pool with this option."""
        return phases_of(self.pool("pool", option), self.workload, self.constants)

    def pool(self, name: str, option: PoolOption) -> PlacedPool:
        """The pool with this option."""
        layouts = {role: layout for choice in option.choices for role, layout in choice.layouts.items()}
        rollout = next((choice.rollout for choice in option.choices if choice.rollout), None)
        size = option.size
        return PlacedPool(name, size.nodes, size.gpus_per_node, self.cluster[size.kind].gpu, layouts, rollout)

    def _choices(self, unit: tuple[Role, ...], size: PoolSize) -> list[RoleChoice]:
        """All choices that the contract accepts for these roles. Their seconds are not computed."""
        found = []
        trained = [role for role in unit if role is not Role.ROLLOUT]
        gpu = self.cluster[size.kind].gpu
        engines = list(rollout_layouts(self.workload, size, gpu)) if Role.ROLLOUT in unit else [None]
        per_role = [list(train_layouts(role, self.workload, size)) for role in trained]
        for engine, each in product(engines, product(*per_role)):
            layouts: dict[Role, TrainLayout] = dict(zip(trained, each, strict=True))
            if Role.ACTOR in layouts and self._reference_is_actor:
                layouts[Role.REF] = layouts[Role.ACTOR]
            bare = RoleChoice(layouts, engine, ())
            found.append(replace(bare, phases=self.phases(_option(unit, size, [bare]))))
        return found

    def _fitting_choices(self, unit: tuple[Role, ...], size: PoolSize) -> list[RoleChoice]:
        """The choices that fit if these roles are alone on the pool. A choice is left out if another one with the same
        rollout layout is at least as good by every number of `RoleChoice.costs`."""
        fit = [each for each in self.choices(unit, size) if all(phase.spare >= 0 for phase in each.phases)]
        found = [replace(each, seconds=self._seconds(each, size)) for each in fit]
        found.sort(key=lambda each: (sum(each.seconds), each.num_sequence_parallel, each.most_bytes))
        kept: list[RoleChoice] = []
        for choice in found:
            if not any(one.rollout == choice.rollout and is_no_worse(one.costs, choice.costs) for one in kept):
                kept.append(choice)
        return kept

    def step_seconds(self, schedule: Schedule, stages: StageSeconds) -> float:
        """Seconds of a step, from the seconds of each stage on its slowest pool."""
        return total_seconds(self.stages(stages), schedule) + self.constants.step_seconds

    def stages(self, stages: StageSeconds) -> StageSeconds:
        """The same seconds, or those of reward functions if these are longer. They run on the host instead of a
        pool."""
        return longest([stages, self._of_functions])

    def _seconds(self, choice: RoleChoice, size: PoolSize) -> StageSeconds:
        node_type = NodeType(self.cluster[size.kind].gpu, size.gpus_per_node)
        costs = pool_costs(self.workload, self._lengths, choice.layouts, choice.rollout, node_type, self.constants)
        return stage_seconds({name: cost.seconds for name, cost in costs.items()}, self.workload)


def _option(roles: tuple[Role, ...], size: PoolSize, choices: Sequence[RoleChoice]) -> PoolOption:
    """The option of these choices. The roles of a stage take turns on the pool, so their seconds are added."""
    seconds = tuple(map(sum, zip(*(choice.seconds for choice in choices), strict=True)))
    return PoolOption(roles, size, tuple(choices), seconds)


def units_of(roles: Sequence[Role]) -> list[tuple[Role, ...]]:
    """Divides roles into units; the layouts of a unit are chosen together. Actor and rollout are one unit, because the
    weight sync depends on both layouts. Each other role is a unit alone."""
    both = tuple(role for role in roles if role in (Role.ACTOR, Role.ROLLOUT))
    rest: list[tuple[Role, ...]] = [(role,) for role in roles if role not in both]
    return [both, *rest] if both else rest


def is_no_worse(seconds: StageSeconds, other: StageSeconds) -> bool:
    """Whether no stage in `seconds` takes longer than in `other`."""
    return all(map(le, seconds, other))


def longest(seconds: Iterable[StageSeconds]) -> StageSeconds:
    """For each stage, its longest time in any of `seconds`."""
    return tuple(map(max, zip(*seconds, strict=True)))


def pool_sizes(cluster: Cluster) -> list[PoolSize]:
    """All pool sizes, smallest first for each node type."""
    return [
        PoolSize(kind, nodes, group.gpus_per_node)
        for kind, group in enumerate(cluster)
        for nodes in node_counts(group.nodes)
    ]


def node_counts(num_nodes: int) -> list[int]:
    """The numbers of nodes that are tried: 1, 2, 3, 4, 6, 8, 12, 16, ..., and `num_nodes` itself."""
    powers = [2**power for power in range(num_nodes.bit_length())]
    counts = {num_nodes, *powers, *(3 * power for power in powers)}
    return sorted(count for count in counts if 0 < count <= num_nodes)


def train_layouts(role: Role, workload: Workload, size: PoolSize) -> Iterator[TrainLayout]:
    """The layouts of a train role that the contract accepts."""
    layouts = (
        TrainLayout(size.num_gpus, shards, sequence_parallel)
        for sequence_parallel in sequence_parallel_sizes(role, workload, size)
        for shards in shard_sizes(size)
    )
    return (layout for layout in layouts if is_allowed(workload, role, layout))


def sequence_parallel_sizes(role: Role, workload: Workload, size: PoolSize) -> list[int]:
    """Possible sizes of sequence parallelism for a role. They divide the GPUs of a node and the attention heads."""
    shape = workload.models[role].shape
    return [each for each in _sizes_within_a_node(size) if shape.spreads_over(each)]


def rollout_layouts(workload: Workload, size: PoolSize, gpu: Gpu) -> Iterator[RolloutLayout]:
    """The possible layouts of the rollout. Only vLLM supports tensor parallelism, on whole GPUs."""
    can_split = workload.rollout.is_vllm and not gpu.is_mig_device
    for parallel in _sizes_within_a_node(size) if can_split else [1]:
        if workload.rollout.shape.allows_tensor_parallel(parallel):
            yield RolloutLayout(size.num_gpus, parallel)


def _sizes_within_a_node(size: PoolSize) -> list[int]:
    """Sizes of tensor or sequence parallelism that divide the GPUs of a node, at most MOST_PARALLEL."""
    return [each for each in divisors(size.gpus_per_node) if each <= MOST_PARALLEL]


def shard_sizes(size: PoolSize) -> list[int]:
    """Possible shard sizes: a number of GPUs that divides those of a node, or whole nodes."""
    several_nodes = [size.gpus_per_node * nodes for nodes in divisors(size.nodes)[1:]]
    return [*divisors(size.gpus_per_node), *several_nodes]
