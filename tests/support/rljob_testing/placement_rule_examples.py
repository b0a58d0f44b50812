"""The part of `rule_examples` about where roles run."""

from __future__ import annotations

from collections.abc import Mapping

from rljob_testing.bad_job import Bad

_T = "spec.training."
_APART = {"actor": {"pool": "second"}, "rollout": {"pool": "second"}, "ref": {"pool": "main"}}
_SECOND = {"spec.pools[1]": {"name": "second"}}

GOOD: dict[str, list[Mapping[str, object]]] = {
    "RLJobSpec.pools.name": [{}],
    "RLJobSpec.actorPool": [{"spec.roles.actor.pool": "main"}],
    "RLJobSpec.rolloutPool": [{"spec.roles.rollout.pool": "main"}],
    "RLJobSpec.refPool": [{"spec.roles.ref.pool": "main", _T + "algorithm.kl.coefficient": 0.1}],
    "RLJobSpec.actorWithRollout": [
        {"spec.roles": {role: {"pool": "main"} for role in ("actor", "rollout")}},
        {"spec.roles": {"actor": {"pool": "main"}}},
        {**_SECOND, "spec.roles": _APART, _T + "algorithm.kl.coefficient": 0.1},
    ],
    "RLJobSpec.refUsed": [
        {**_SECOND, "spec.roles.ref.pool": "second", _T + "algorithm.kl.coefficient": 1e-9},
        *(
            {
                "spec.pools[1]": {"name": "second"},
                "spec.roles.ref.pool": "second",
                _T + f"algorithm.{part}": {"type": "Function", "function": {"path": "mine:function"}},
            }
            for part in ("advantage", "loss")
        ),
    ],
    "RLJobSpec.noIdlePool": [
        {"spec.pools[0].nodes": 2},
        {**_SECOND, "spec.roles": _APART, _T + "algorithm.kl.coefficient": 0.1},
    ],
}

BAD: dict[str, list[Bad]] = {
    "RLJobSpec.pools.name": [
        Bad(
            "spec.pools",
            {"spec.pools[1]": {"name": "main", "gpusPerNode": 2}},
            places=("spec.pools[0].name", "spec.pools[1].name"),
        )
    ],
    "RLJobSpec.actorPool": [
        Bad("spec.roles.actor.pool", {"spec.roles.actor.pool": "other"}),
        # Another pool has no role for want of the right name.
        Bad("spec.roles.actor.pool", {**_SECOND, "spec.roles": {"actor": {"pool": "secnd"}}}),
    ],
    "RLJobSpec.rolloutPool": [Bad("spec.roles.rollout.pool", {"spec.roles.rollout.pool": "other"})],
    "RLJobSpec.refPool": [
        Bad("spec.roles.ref.pool", {"spec.roles.ref.pool": "other"}),
        Bad("spec.roles.ref.pool", {**_SECOND, "spec.roles.ref.pool": "other", _T + "algorithm.kl.coefficient": 0.1}),
        Bad("spec.roles.ref.pool", {"spec.roles.ref.pool": "other", _T + "algorithm.kl.coefficient": 0.1}),
    ],
    "RLJobSpec.refUsed": [
        Bad("spec.roles.ref.pool", {**_SECOND, "spec.roles.ref.pool": "second"}),
        Bad("spec.roles.ref.pool", {"spec.roles.ref.pool": "main"}),
    ],
    "RLJobSpec.actorWithRollout": [
        Bad("spec.roles", {**_SECOND, "spec.roles.rollout.pool": "second"}),
    ],
    "RLJobSpec.noIdlePool": [
        Bad("spec.pools", _SECOND, places=("spec.pools[1].name",)),
        Bad(
            "spec.pools",
            {**_SECOND, "spec.pools[2]": {"name": "third"}},
            places=("spec.pools[1].name", "spec.pools[2].name"),
        ),
        # The first pool is the default of roles that this job does not have.
        Bad(
            "spec.pools",
            {**_SECOND, "spec.roles": {role: {"pool": "second"} for role in ("actor", "rollout")}},
            places=("spec.pools[0].name",),
        ),
    ],
}
