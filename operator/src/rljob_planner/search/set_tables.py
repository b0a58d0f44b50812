"""The tables of the search, made from the planner's models of memory and time: for each set of roles on each pool
there might be, its fastest choices that fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rljob_planner.constants import Constants
from rljob_planner.gpus import Cluster
from rljob_planner.memory.phases import phases_of
from rljob_planner.placement import PlacedPool, Placement, RolloutLayout, Schedule, TrainLayout
from rljob_planner.search.arrangements import Arrangement
from rljob_planner.search.options import SetOption, StageSeconds
from rljob_planner.search.partitions import RoleSet, members
from rljob_planner.search.role_choices import GENERATION, SYNC, RoleChoice, RoleChoices
from rljob_planner.search.role_layouts import PoolSize, pool_sizes
from rljob_planner.search.set_choices import SetChoice, fastest_that_fit
from rljob_planner.workload import Role, Workload


@dataclass(frozen=True, slots=True)
class PoolChoice:
    """A pool with roles on it."""

    size: PoolSize
    choices: tuple[RoleChoice, ...]

    @property
    def layouts(self) -> dict[Role, TrainLayout]:
        """Of the train roles."""
        return {role: layout for choice in self.choices for role, layout in choice.layouts}

    @property
    def rollout(self) -> RolloutLayout | None:
        """None where it is elsewhere."""
        return next((choice.rollout for choice in self.choices if choice.rollout is not None), None)

    @property
    def num_sequence_parallel(self) -> int:
        """Roles whose ranks share rows."""
        return sum(choice.num_sequence_parallel for choice in self.choices)


Option = SetOption[PoolChoice]


class SetTables:
    """Of one job on one cluster."""

    def __init__(self, workload: Workload, cluster: Cluster, constants: Constants) -> None:
        self.workload = workload
        self.cluster = cluster
        self.constants = constants
        self.role_choices = RoleChoices(workload, cluster, constants)
        self.roles = self.role_choices.roles
        self.capacity = tuple(group.num_gpus for group in cluster)
        self.sizes = [size for kind, group in enumerate(cluster) for size in pool_sizes(kind, group)]
        self.everyone: RoleSet = (1 << len(self.roles)) - 1
        self._fits: dict[PoolChoice, bool] = {}
        self.options: dict[RoleSet, list[Option]] = {
            roles: [option for size in self.sizes for option in self._options(roles, size, asks_memory=False)]
            for roles in range(1, self.everyone + 1)
        }

    def seconds(self, schedule: Schedule, stages: StageSeconds) -> float:
        """Of a step whose stages' slowest pools take so long, as `timing.step` adds it up."""
        found = self.role_choices.total(stages)
        if schedule is Schedule.SYNCHRONOUS:
            return sum(found) + self.constants.step_seconds
        rest = sum(found) - found[SYNC] - found[GENERATION]
        return max(found[GENERATION], rest) + found[SYNC] + self.constants.step_seconds

    def bit(self, role: Role) -> RoleSet:
        """The set of this role alone."""
        return 1 << self.roles.index(role)

    def fits(self, choice: PoolChoice) -> bool:
        """Whether every phase on such a pool does."""
        known = self._fits.get(choice)
        if known is None:
            phases = phases_of(self.pool("pool", choice), self.workload, self.constants)
            known = self._fits[choice] = all(phase.spare >= 0 for phase in phases)
        return known

    def correct(self, arrangements: Iterable[Arrangement[PoolChoice]]) -> bool:
        """Whether all of their pools fit, phase by phase. The tables' sums leave a few bytes out: where they have been
        too hopeful, the options of that set on that pool are worked out anew."""
        wrong = {
            (roles, option.payload.size)
            for arrangement in arrangements
            for roles, option in arrangement.sets
            if not self.fits(option.payload)
        }
        for roles, size in wrong:
            others = [option for option in self.options[roles] if option.payload.size != size]
            self.options[roles] = [*others, *self._options(roles, size, asks_memory=True)]
        return not wrong

    def plain(self, roles: RoleSet, size: PoolSize) -> list[Option]:
        """Those without sequence parallelism, where that can be left out."""
        return self._options(roles, size, asks_memory=True, is_plain=True)

    def roomier(self, roles: RoleSet, option: Option, place: int) -> Iterator[Option]:
        """The same set and pool with another layout of one role (`place` among its choices), which needs less memory
        and shares no more rows; least memory first."""
        size, chosen = option.payload.size, option.payload.choices
        now = chosen[place]
        unit = self.role_choices.of([self.roles[each] for each in members(roles)], size)[place]
        for choice in sorted(unit, key=lambda each: each.state + each.active):
            is_as_simple = choice.rollout == now.rollout and choice.num_sequence_parallel <= now.num_sequence_parallel
            if is_as_simple and choice.state < now.state and choice.active + choice.state < now.active + now.state:
                choices = (*chosen[:place], choice, *chosen[place + 1 :])
                seconds = tuple(map(sum, zip(*(each.seconds for each in choices), strict=True)))
                payload = PoolChoice(size, choices)
                if self.fits(payload):
                    yield SetOption(size.kind, size.num_gpus, seconds, payload)

    def placement(
        self, arrangement: Arrangement[PoolChoice], schedule: Schedule, pool_names: tuple[str, ...] = ()
    ) -> Placement:
        """The actor's pool first: roles that a job gives no pool are there."""
        sets = sorted(arrangement.sets, key=lambda each: members(each[0]))
        names = [*pool_names[: len(sets)]]
        for roles, _ in sets[len(names) :]:
            name = "main" if len(sets) == 1 else "-".join(_short_name(self.roles[each]) for each in members(roles))
            names.append(name if name not in names else f"{name}-{len(names)}")
        pools = [self.pool(name, option.payload) for name, (_, option) in zip(names, sets, strict=True)]
        return Placement(tuple(pools), schedule)

    def pool(self, name: str, choice: PoolChoice) -> PlacedPool:
        """As the rest of the planner knows it."""
        size = choice.size
        gpu = self.cluster[size.kind].gpu
        return PlacedPool(name, size.nodes, size.gpus_per_node, gpu, choice.layouts, choice.rollout)

    def _options(self, roles: RoleSet, size: PoolSize, *, asks_memory: bool, is_plain: bool = False) -> list[Option]:
        units = self.role_choices.of([self.roles[each] for each in members(roles)], size)
        if is_plain:
            units = [[choice for choice in unit if not choice.num_sequence_parallel] for unit in units]

        def fits(found: SetChoice) -> bool:
            return not asks_memory or self.fits(PoolChoice(size, found.choices))

        found = fastest_that_fit(units, self.role_choices.limit(size), fits)
        return [SetOption(size.kind, size.num_gpus, each.seconds, PoolChoice(size, each.choices)) for each in found]


def _short_name(role: Role) -> str:
    return "reward" if role is Role.REWARD_MODEL else role.value
