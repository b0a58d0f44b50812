"""All rules between fields, and the two questions asked of them: what is broken, and what may not be changed.

Each rule stands once, with its Python predicate, its CEL text and its message; pydantic runs the predicates here, the
API server runs the CEL that `crdgen` puts into the CRD. Rules on `Metadata` stand at the root there, because a CRD may
not describe metadata.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from rljob_api.base import WireModel
from rljob_api.rule import Path, Rule, Violation, cel_property, wire_name
from rljob_api.v1alpha1.advantage import ADVANTAGE_RULES
from rljob_api.v1alpha1.affinity import AFFINITY_RULES
from rljob_api.v1alpha1.algorithm_rules import ALGORITHM_RULES
from rljob_api.v1alpha1.batch_size_rules import BATCH_SIZE_RULES
from rljob_api.v1alpha1.checkpoint import CHECKPOINT_RULES
from rljob_api.v1alpha1.dataset import DATASET_RULES
from rljob_api.v1alpha1.dynamic_sampling import DYNAMIC_SAMPLING_RULES
from rljob_api.v1alpha1.environment import ENV_RULES, VOLUME_RULES
from rljob_api.v1alpha1.kl import KL_RULES
from rljob_api.v1alpha1.model import MODEL_RULES
from rljob_api.v1alpha1.optional_roles import CRITIC_RULES
from rljob_api.v1alpha1.placement_rules import OFFLOAD_RULES, PLACEMENT_RULES
from rljob_api.v1alpha1.policy_filtration import POLICY_FILTRATION_RULES
from rljob_api.v1alpha1.policy_loss import POLICY_LOSS_RULES
from rljob_api.v1alpha1.pools import POOL_RULES
from rljob_api.v1alpha1.resources import RESOURCE_RULES
from rljob_api.v1alpha1.reward import REWARD_RULES
from rljob_api.v1alpha1.rollout import ROLLOUT_RULES
from rljob_api.v1alpha1.rollout_correction import CORRECTION_RULES
from rljob_api.v1alpha1.spec import METADATA_RULES, UNIQUE_RULES, RLJobSpec
from rljob_api.v1alpha1.training import TRAINING_RULES

RULES: tuple[Rule, ...] = (
    *METADATA_RULES,
    *UNIQUE_RULES,
    *PLACEMENT_RULES,
    *POOL_RULES,
    *AFFINITY_RULES,
    *RESOURCE_RULES,
    *ENV_RULES,
    *VOLUME_RULES,
    *CHECKPOINT_RULES,
    *DATASET_RULES,
    *MODEL_RULES,
    *ROLLOUT_RULES,
    *REWARD_RULES,
    *TRAINING_RULES,
    *ADVANTAGE_RULES,
    *POLICY_LOSS_RULES,
    *KL_RULES,
    *ALGORITHM_RULES,
    *DYNAMIC_SAMPLING_RULES,
    *CRITIC_RULES,
    *CORRECTION_RULES,
    *POLICY_FILTRATION_RULES,
    *BATCH_SIZE_RULES,
    *OFFLOAD_RULES,
)

MUTABLE_SPEC_FIELDS = ("suspend", "run_policy")
_FIXED_WRONG = "cannot be changed while the job exists"
_FIXED_ADVICE = "create a job of another name (only suspend and runPolicy may change)"
_LONGEST_SHOWN = 80


@dataclass(frozen=True)
class FixedField:
    """A field of the spec that keeps its value for the life of the job."""

    name: str
    """The Python name."""
    field: str
    cel: str
    message: str = f"{_FIXED_WRONG}; {_FIXED_ADVICE}"


def fixed_fields() -> tuple[FixedField, ...]:
    """The immutable fields of the spec with their CEL transition rules."""
    fixed = []
    for name, info in RLJobSpec.model_fields.items():
        if name in MUTABLE_SPEC_FIELDS:
            continue
        wire = cel_property(wire_name(RLJobSpec, name))
        same = f"self.{wire} == oldSelf.{wire}"
        if not info.is_required() and info.get_default(call_default_factory=True) is None:
            same = f"has(self.{wire}) == has(oldSelf.{wire}) && (!has(self.{wire}) || {same})"
        fixed.append(FixedField(name=name, field=f".{wire_name(RLJobSpec, name)}", cel=same))
    return tuple(fixed)


def immutable_changes(old: RLJobSpec, new: RLJobSpec) -> tuple[Violation, ...]:
    """What an update changes although it may not; the API server refuses the same."""
    before, after = dict(old), dict(new)
    return tuple(
        Violation(rule="immutable", path=("spec", fixed.field[1:]), wrong=_FIXED_WRONG, advice=_FIXED_ADVICE)
        for fixed in fixed_fields()
        if before[fixed.name] != after[fixed.name]
    )


def violations(value: WireModel, path: Path = ()) -> tuple[Violation, ...]:
    """Every rule that the value, or anything within it, breaks. `path` is the place of the value in the job."""
    wire = value.model_dump(mode="json", by_alias=True)
    return tuple(
        Violation(
            rule=rule.name,
            path=path + at,
            wrong=rule.wrong,
            advice=advice,
            seen=None if rule.is_about_secret else _seen(wire, at),
        )
        for rule, at, advice in _broken(value, ())
    )


def _broken(value: WireModel, path: Path) -> Iterator[tuple[Rule, Path, str]]:
    """The rules broken at this value and below, with the places of the faults and what to do."""
    for rule in RULES:
        if rule.on is type(value) and not rule.holds(value):
            for place in rule.places(value):
                choices = rule.choices(value, place)
                advice = f"{rule.advice} ({', '.join(choices)})" if choices else rule.advice
                yield rule, (*path, *rule.field.split(".")[1:], *place), advice
    for name, item in value:
        at = (*path, wire_name(type(value), name))
        if isinstance(item, WireModel):
            yield from _broken(item, at)
        elif isinstance(item, tuple):
            for index, entry in enumerate(item):
                if isinstance(entry, WireModel):
                    yield from _broken(entry, (*at, index))


def _seen(wire: object, path: Path) -> str | None:
    """The short value at a path of the wire form, as JSON; None where there is nothing short to show."""
    for part in path:
        if isinstance(wire, dict):
            wire = wire.get(part)
        elif isinstance(wire, list) and isinstance(part, int):
            wire = wire[part]
    if wire is None or isinstance(wire, dict | list):
        return None
    shown = json.dumps(wire, ensure_ascii=False)
    return shown if len(shown) <= _LONGEST_SHOWN else None
