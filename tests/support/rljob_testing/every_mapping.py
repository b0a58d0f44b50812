"""Every mapping of a job onto a cluster, one by one: slow, and apart from the search.

It makes placements as the rules of a job allow them, and asks the planner's own models of each whole placement how long
a step takes and whether each phase fits. It knows no stages, sums or bounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import inf

from rljob_planner.constants import Constants
from rljob_planner.gpus import Cluster
from rljob_planner.memory.phases import phases_of
from rljob_planner.placement import PlacedPool, Placement, RolloutLayout, Schedule, TrainLayout
from rljob_planner.timing.step import step_time
from rljob_planner.workload import Role, Workload

Shape = frozenset[tuple[frozenset[Role], int]]
"""Roles that share a pool, and the number of its group of nodes."""


@dataclass
class EveryMapping:
    """Of one job on one cluster."""

    workload: Workload
    cluster: Cluster
    constants: Constants
    num_tried: int = 0
    _fits: dict[tuple[object, ...], bool] = field(default_factory=dict)

    def fastest(self, schedule: Schedule) -> dict[Shape, float]:
        """Of each grouping of roles on kinds of nodes the seconds of the fastest step that fits."""
        best: dict[Shape, float] = {}
        for groups in groupings(self.workload.roles):
            if schedule is Schedule.ONE_STEP_OFF and [Role.ROLLOUT] not in groups:
                continue
            choices = [list(self._pools(group)) for group in groups]
            for pools in product(*choices):
                if not self._has_room(pools):
                    continue
                placement = Placement(tuple(pool for _, pool in pools), schedule)
                shape = frozenset((frozenset(g), kind) for g, (kind, _) in zip(groups, pools, strict=True))
                self.num_tried += 1
                seconds = step_time(self.workload, placement, self.constants).total.likely
                best[shape] = min(seconds, best.get(shape, inf))
        return best

    def _has_room(self, pools: Sequence[tuple[int, PlacedPool]]) -> bool:
        used = [0] * len(self.cluster)
        for kind, pool in pools:
            used[kind] += pool.num_gpus
        return all(mine <= group.num_gpus for mine, group in zip(used, self.cluster, strict=True))

    def _pools(self, group: Sequence[Role]) -> Iterator[tuple[int, PlacedPool]]:
        """All pools that these roles can share and that fit."""
        for kind, nodes in enumerate(self.cluster):
            per_node = nodes.gpus_per_node
            parts = [(1, size) for size in (1, 2, 4, 8, 16) if size < per_node and per_node % size == 0]
            for num_nodes, size in parts + [(num, per_node) for num in range(1, nodes.nodes + 1)]:
                num_gpus = num_nodes * size
                layouts = [list(self._layouts(role, num_gpus, size)) for role in group]
                for chosen in product(*layouts):
                    given = dict(zip(group, chosen, strict=True))
                    pool = _pool(num_nodes, size, kind, self.cluster, given)
                    if self._does_fit(kind, pool):
                        yield kind, pool

    def _does_fit(self, kind: int, pool: PlacedPool) -> bool:
        key = (kind, pool.nodes, pool.gpus_per_node, frozenset(pool.layouts.items()), pool.rollout)
        if key not in self._fits:
            phases = phases_of(pool, self.workload, self.constants)
            self._fits[key] = all(phase.spare >= 0 for phase in phases)
        return self._fits[key]

    def _layouts(self, role: Role, num_gpus: int, per_node: int) -> Iterator[TrainLayout | RolloutLayout]:
        work = self.workload
        shape = work.rollout.shape if role is Role.ROLLOUT else work.models[role].shape
        for parallel in (1, 2, 4, 8):
            heads_divide = shape.num_heads % parallel == 0 and (
                shape.num_kv_heads % parallel == 0 or parallel % shape.num_kv_heads == 0
            )
            if per_node % parallel or not heads_divide:
                continue
            if role is Role.ROLLOUT:
                yield RolloutLayout(num_gpus, parallel)
                continue
            if work.max_tokens_per_micro_batch * parallel < work.lengths.longest_row:
                continue
            rows = [work.batch_size * work.group_size] if role is Role.ACTOR else []
            rows += [work.mini_batch_size * work.group_size] if role in (Role.ACTOR, Role.CRITIC) else []
            if any(count * parallel % num_gpus for count in rows):
                continue
            for shards in range(1, num_gpus + 1):
                is_part_of_node = per_node % shards == 0
                is_whole_nodes = shards % per_node == 0 and num_gpus % shards == 0
                if is_part_of_node or is_whole_nodes:
                    yield TrainLayout(num_gpus, shards, parallel)


def groupings(roles: Sequence[Role]) -> list[list[list[Role]]]:
    """All set partitions, by putting one role after the other into a group that is there or a new one."""
    found: list[list[list[Role]]] = [[]]
    for role in roles:
        found = [longer for before in found for longer in _with(role, before)]
    return found


def _with(role: Role, groups: list[list[Role]]) -> Iterator[list[list[Role]]]:
    for place, group in enumerate(groups):
        yield [*groups[:place], [*group, role], *groups[place + 1 :]]
    yield [*groups, [role]]


def _pool(
    nodes: int,
    per_node: int,
    kind: int,
    cluster: Cluster,
    layouts: Mapping[Role, TrainLayout | RolloutLayout],
) -> PlacedPool:
    rollout = layouts.get(Role.ROLLOUT)
    assert rollout is None or isinstance(rollout, RolloutLayout), "of the rollout"
    trained = {role: layout for role, layout in layouts.items() if isinstance(layout, TrainLayout)}
    return PlacedPool("-".join(layouts), nodes, per_node, cluster[kind].gpu, trained, rollout)
