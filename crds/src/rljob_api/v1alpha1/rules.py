"""All rules between fields. Finds the rules that a job breaks, and changes of immutable fields.

Each rule is defined once, with its Python predicate, its CEL expression and its message. pydantic runs the predicates;
the API server runs the CEL, which `crdgen` writes into the CRD. There, rules on `Metadata` are at the root of the
schema, because a CRD may not describe metadata.
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
from rljob_api.v1alpha1.environment import ENVIRONMENT_RULES
from rljob_api.v1alpha1.environment_rules import TRAINING_ENVIRONMENT_RULES, TRAINING_EVALUATION_RULES
from rljob_api.v1alpha1.kl import KL_RULES
from rljob_api.v1alpha1.model import MODEL_RULES
from rljob_api.v1alpha1.optional_roles import CRITIC_RULES, TEACHER_RULES
from rljob_api.v1alpha1.placement_rules import OFFLOAD_RULES, PLACEMENT_RULES
from rljob_api.v1alpha1.pod_environment import ENV_RULES, VOLUME_RULES
from rljob_api.v1alpha1.policy_loss import POLICY_LOSS_RULES
from rljob_api.v1alpha1.pools import POOL_RULES
from rljob_api.v1alpha1.resources import RESOURCE_RULES
from rljob_api.v1alpha1.response_selection import DYNAMIC_SAMPLING_RULES, POLICY_FILTRATION_RULES
from rljob_api.v1alpha1.reward import REWARD_RULES
from rljob_api.v1alpha1.rollout import ROLLOUT_RULES
from rljob_api.v1alpha1.rollout_correction import CORRECTION_RULES
from rljob_api.v1alpha1.spec import METADATA_RULES, SCHEDULING_RULES, UNIQUE_RULES, RLJobSpec
from rljob_api.v1alpha1.tracker import TRACKER_RULES
from rljob_api.v1alpha1.training import TRAINING_RULES

RULES: tuple[Rule, ...] = (
    *METADATA_RULES,
    *UNIQUE_RULES,
    *SCHEDULING_RULES,
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
    *TRACKER_RULES,
    *ENVIRONMENT_RULES,
    *TRAINING_ENVIRONMENT_RULES,
    *TRAINING_EVALUATION_RULES,
    *ADVANTAGE_RULES,
    *POLICY_LOSS_RULES,
    *KL_RULES,
    *ALGORITHM_RULES,
    *DYNAMIC_SAMPLING_RULES,
    *CRITIC_RULES,
    *TEACHER_RULES,
    *CORRECTION_RULES,
    *POLICY_FILTRATION_RULES,
    *BATCH_SIZE_RULES,
    *OFFLOAD_RULES,
)

MUTABLE_SPEC_FIELDS = ("suspend", "run_policy")
_IMMUTABLE_WRONG = "is immutable"
_IMMUTABLE_ADVICE = "create a job with another name (only suspend and runPolicy may change)"
_MAX_SHOWN_CHARACTERS = 80


@dataclass(frozen=True)
class ImmutableField:
    """An immutable field of the spec."""

    name: str
    """The Python name."""
    field: str
    """The path relative to the spec, such as `.pools`."""
    cel: str
    """CEL that compares the old with the new value."""
    message: str = f"{_IMMUTABLE_WRONG}; {_IMMUTABLE_ADVICE}"


def immutable_fields() -> tuple[ImmutableField, ...]:
    """The immutable fields of the spec with their CEL transition rules."""
    found = []
    for name, info in RLJobSpec.model_fields.items():
        if name in MUTABLE_SPEC_FIELDS:
            continue
        wire = cel_property(wire_name(RLJobSpec, name))
        same = f"self.{wire} == oldSelf.{wire}"
        if not info.is_required() and info.get_default(call_default_factory=True) is None:
            same = f"has(self.{wire}) == has(oldSelf.{wire}) && (!has(self.{wire}) || {same})"
        found.append(ImmutableField(name=name, field=f".{wire_name(RLJobSpec, name)}", cel=same))
    return tuple(found)


def immutable_changes(old: RLJobSpec, new: RLJobSpec) -> tuple[Violation, ...]:
    """The violations by an update that changes immutable fields. The API server rejects the same changes."""
    before, after = dict(old), dict(new)
    return tuple(
        Violation(rule="immutable", path=("spec", each.field[1:]), wrong=_IMMUTABLE_WRONG, advice=_IMMUTABLE_ADVICE)
        for each in immutable_fields()
        if before[each.name] != after[each.name]
    )


def violations(value: WireModel, path: Path = ()) -> tuple[Violation, ...]:
    """All violations of rules by the value and the values within it. `path` is the path of `value` in the job."""
    wire = value.model_dump(mode="json", by_alias=True)
    return tuple(
        Violation(
            rule=rule.name,
            path=path + at,
            wrong=rule.wrong,
            advice=advice,
            seen=None if rule.is_about_secret else _shown(at[-1]) if rule.is_about_key else _seen(wire, at),
        )
        for rule, at, advice in _broken(value, ())
    )


def _broken(value: WireModel, path: Path) -> Iterator[tuple[Rule, Path, str]]:
    """The rules that this value or a value within it breaks, each with the path of the fault and the advice."""
    for rule in RULES:
        if rule.on is type(value) and not rule.holds(value):
            for fault_path in rule.fault_paths(value):
                details = rule.details(value, fault_path)
                advice = f"{rule.advice} ({', '.join(details)})" if details else rule.advice
                yield rule, (*path, *rule.field.split(".")[1:], *fault_path), advice
    for name, item in value:
        at = (*path, wire_name(type(value), name))
        if isinstance(item, WireModel):
            yield from _broken(item, at)
        elif isinstance(item, tuple):
            for index, entry in enumerate(item):
                if isinstance(entry, WireModel):
                    yield from _broken(entry, (*at, index))


def _seen(wire: object, path: Path) -> str | None:
    """The value at a path of the wire form, as JSON; None if it is not a scalar or too long to show."""
    for part in path:
        if isinstance(wire, dict):
            wire = wire.get(part)
        elif isinstance(wire, list) and isinstance(part, int):
            wire = wire[part]
    return None if wire is None or isinstance(wire, dict | list) else _shown(wire)


def _shown(value: object) -> str | None:
    """The value as JSON; None if it is too long to show."""
    shown = json.dumps(value, ensure_ascii=False)
    return shown if len(shown) <= _MAX_SHOWN_CHARACTERS else None
