"""`rljob plan --search`: what another placement changes in a job file, field by field."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rljob_api.v1alpha1.optional_roles import absent_roles
from rljob_api.v1alpha1.pools import Pool
from rljob_api.v1alpha1.spec import RLJobSpec, RolloutRole, TrainRole

Value = str | int | None

POOL_FIELDS = ("nodes", "gpusPerNode")
ROLE_FIELDS = ("pool", "shardSize", "sequenceParallel", "tensorParallel")
"""Those of which a placement decides."""


@dataclass(frozen=True)
class FieldChange:
    """A field with its value before and after; None where it is left to its default."""

    path: str
    before: Value
    after: Value


@dataclass(frozen=True)
class PlacementChanges:
    """What becomes of pools and roles."""

    added: tuple[Pool, ...]
    removed: tuple[Pool, ...]
    fields: tuple[FieldChange, ...]

    @property
    def is_empty(self) -> bool:
        """Whether the file says it already."""
        return not (self.added or self.removed or self.fields)

    def lines(self) -> Iterator[str]:
        """`+`, `-` and `~`, as one reads them."""
        for pool in self.removed:
            yield f"- pool {pool.name}: {pool.nodes} x {pool.gpus_per_node} GPUs"
        for pool in self.added:
            yield f"+ pool {pool.name}: {pool.nodes} x {pool.gpus_per_node} GPUs"
        for field in self.fields:
            before, after = ("(default)" if value is None else value for value in (field.before, field.after))
            yield f"~ {field.path}: {before} -> {after}"


def placement_changes(old: RLJobSpec, new: RLJobSpec) -> PlacementChanges:
    """From a job to the same with other pools and places."""
    before, after = ({pool.name: pool for pool in spec.pools} for spec in (old, new))
    fields: list[FieldChange] = []
    for name in before.keys() & after.keys():
        for field, was, now in zip(POOL_FIELDS, _sizes(before[name]), _sizes(after[name]), strict=True):
            if was != now:
                fields.append(FieldChange(f"spec.pools[{name}].{field}", was, now))
    fields.sort(key=lambda field: field.path)
    return PlacementChanges(
        added=tuple(pool for name, pool in after.items() if name not in before),
        removed=tuple(pool for name, pool in before.items() if name not in after),
        fields=(*fields, *_role_changes(old, new)),
    )


def role_values(spec: RLJobSpec, role: str) -> dict[str, Value]:
    """ROLE_FIELDS of a role with their values, None for what is the default."""
    if role == "rollout":
        rollout: RolloutRole = spec.roles.rollout
        parallel = rollout.tensor_parallel
        return {"pool": _named_pool(spec, rollout.pool), "tensorParallel": None if parallel == 1 else parallel}
    place: TrainRole = spec.roles.train_role(role)
    shares = place.sequence_parallel
    return {
        "pool": _named_pool(spec, place.pool),
        "shardSize": place.shard_size,
        "sequenceParallel": None if shares == 1 else shares,
    }


def roles_of(spec: RLJobSpec) -> list[str]:
    """Those that the job has."""
    absent = absent_roles(spec)
    return [role for role in spec.placed_roles() if role not in absent]


def _named_pool(spec: RLJobSpec, name: str | None) -> str | None:
    """None for the first pool, which a role has that names none."""
    return None if name == spec.pools[0].name else name


def _role_changes(old: RLJobSpec, new: RLJobSpec) -> Iterator[FieldChange]:
    for role in roles_of(old):
        before, after = role_values(old, role), role_values(new, role)
        for field, was in before.items():
            if was != after[field]:
                yield FieldChange(f"spec.roles.{role}.{field}", was, after[field])


def _sizes(pool: Pool) -> tuple[int, int]:
    return pool.nodes, pool.gpus_per_node
