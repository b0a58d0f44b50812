"""`rljob plan --search`: the search, and where nothing fits another one of the job with what would make it fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_api.yaml_text import read_yaml
from rljob_planner.constants import Constants
from rljob_planner.gpus import Cluster
from rljob_planner.memory.changes import Change
from rljob_planner.plan import Plan
from rljob_planner.search.mapping import search
from rljob_planner.search.results import SearchResult
from rljob_planner.workload import Workload

WirePath = tuple[str | int, ...]


@dataclass(frozen=True)
class JobMapping:
    """What a search has found."""

    spec: RLJobSpec
    """The job, with `changes`."""
    result: SearchResult
    changes: tuple[Change, ...] = ()
    """Of the job's training: those without which nothing fits."""
    missed: SearchResult | None = None
    """Of the job without them."""

    @property
    def best(self) -> Plan | None:
        """The best that this version can run."""
        return None if self.result.best_today is None else self.result.best_today.plan


def find_mapping(spec: RLJobSpec, workload: Workload, cluster: Cluster, constants: Constants) -> JobMapping:
    """The best mappings of the job; where none fits, those of the job with the changes of its training that would make
    the nearest miss fit. Raises PlanError."""
    result = search(workload, cluster, constants, pool_names=[pool.name for pool in spec.pools])
    changed = None if result.nearest_miss is None else result.nearest_miss.changed
    if changed is None or changed.result.best_today is None:
        return JobMapping(spec, result)
    # A job that learns something else is not what was asked for.
    if any(change.is_drastic for change in changed.changes):
        return JobMapping(spec, result)
    return JobMapping(changed_spec(spec, changed.changes), changed.result, changed.changes, missed=result)


def changed_spec(spec: RLJobSpec, changes: Sequence[Change]) -> RLJobSpec:
    """The job with these values in its fields."""
    wire = spec.to_wire()
    for change in changes:
        put_value(wire, change_path(change, spec), change_value(change))
    return RLJobSpec.from_wire(wire)


def put_value(wire: object, path: WirePath, value: object) -> None:
    """Into blocks and lists as a job file has them; blocks on the way are made."""
    *way, last = path
    place = wire
    for part in way:
        if isinstance(part, int):
            assert isinstance(place, list), "an index is one of a list"
            place = place[part]
        else:
            assert isinstance(place, dict), "a block is in a block"
            place = place.setdefault(part, {})
    assert isinstance(place, dict), "a field is in a block"
    place[last] = value


def change_path(change: Change, spec: RLJobSpec) -> WirePath:
    """Below `spec`; `rewards[]` is the reward with a model."""
    parts: list[str | int] = []
    for name in change.field.removeprefix("spec.").split("."):
        plain, brackets, _ = name.partition("[")
        parts.append(plain)
        if brackets:
            rewards = spec.training.rewards
            parts.append(next(at for at, reward in enumerate(rewards) if reward.reward_model is not None))
    return tuple(parts)


def change_value(change: Change) -> object:
    """As a job file has it."""
    return read_yaml(change.value).value
