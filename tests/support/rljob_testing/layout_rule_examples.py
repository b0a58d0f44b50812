"""The part of `rule_examples` about how models are spread over GPUs."""

from __future__ import annotations

from collections.abc import Mapping

from rljob_testing.bad_job import Bad

_T = "spec.training."
_PARALLEL, _ENGINE = "spec.roles.rollout.tensorParallel", _T + "rollout.engine"
_MAKES: dict[str, Mapping[str, object]] = {
    "actor": {},
    "ref": {_T + "algorithm.kl.coefficient": 0.1},
    "critic": {_T + "algorithm.type": "PPO"},
}
"""What gives a job a role with a layout."""
_LAYOUT_FIELDS = ("shardSize", "sequenceParallel")

GOOD: dict[str, list[Mapping[str, object]]] = {
    "RLJobSpec.tensorParallel": [{_PARALLEL: 2}],
    "RLJobSpec.tensorParallelEngine": [{_PARALLEL: 2, _ENGINE: "VLLM"}, {_PARALLEL: 1, _ENGINE: "HuggingFace"}],
    **{
        f"RLJobSpec.{role}.{field}": [{**makes, f"spec.roles.{role}.{field}": number} for number in (2, 1)]
        for role, makes in _MAKES.items()
        for field in _LAYOUT_FIELDS
    },
    **{
        f"RLJobSpec.{role}LayoutUsed": [
            {**_MAKES[role], f"spec.roles.{role}.pool": "main"},
            {
                _T + "algorithm.advantage": {"type": "Function", "function": {"path": "mine:function"}},
                f"spec.roles.{role}.shardSize": 1,
            },
        ]
        for role in ("ref", "critic")
    },
}

BAD: dict[str, list[Bad]] = {
    "RLJobSpec.tensorParallel": [
        Bad(_PARALLEL, {_PARALLEL: 3}),
        Bad(_PARALLEL, {_PARALLEL: 4, "spec.pools[0].nodes": 2}),
    ],
    **{
        f"RLJobSpec.{role}.{field}": [Bad(f"spec.roles.{role}.{field}", {**makes, f"spec.roles.{role}.{field}": 3})]
        for role, makes in _MAKES.items()
        for field in _LAYOUT_FIELDS
    },
    **{
        f"RLJobSpec.{role}LayoutUsed": [
            Bad(f"spec.roles.{role}", {f"spec.roles.{role}.{field}": 1}) for field in _LAYOUT_FIELDS
        ]
        for role in ("ref", "critic")
    },
    "RLJobSpec.tensorParallelEngine": [Bad(_PARALLEL, {_PARALLEL: 2, _ENGINE: "HuggingFace"})],
}
