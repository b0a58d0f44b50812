"""The part of `rule_examples` about the reward model."""

from __future__ import annotations

from collections.abc import Mapping

from rljob_testing.bad_job import Bad

_R = "spec.training.rewards"
_SOURCE = {"source": "owner/reward"}
_MODEL = {"type": "RewardModel", "rewardModel": _SOURCE}
_JUDGED = {_R: [_MODEL]}
_POOL = "spec.roles.rewardModel.pool"
_APART = {"spec.pools[1]": {"name": "second", "nodes": 1, "gpusPerNode": 2}, _POOL: "second"}
_PLACE = "spec.roles.rewardModel"

GOOD: dict[str, list[Mapping[str, object]]] = {
    "RLJobSpec.rewardModelPool": [{**_JUDGED, **_APART}, {**_JUDGED, _POOL: "main"}],
    "Training.oneRewardModel": [{_R: [_MODEL, {"name": "exact", "type": "MathAnswer"}]}],
    "RewardModel.revision": [
        {_R: [{"type": "RewardModel", "rewardModel": _SOURCE | {"revision": "main"}}]},
        {_R: [{"type": "RewardModel", "rewardModel": {"source": "./reward"}}]},
    ],
    "RLJobSpec.rewardModelUsed": [{**_JUDGED, **_APART}, {**_JUDGED, _POOL: "main"}],
    "RLJobSpec.rewardModelLayoutUsed": [{**_JUDGED, f"{_PLACE}.shardSize": 1}, {**_JUDGED, f"{_PLACE}.pool": "main"}],
    "RLJobSpec.rewardModel.shardSize": [{**_JUDGED, **_APART, f"{_PLACE}.shardSize": 1}],
    "RLJobSpec.rewardModel.maxTokensPerMicroBatch": [
        {"spec.training.maxTokensPerMicroBatch": 64, "spec.roles.actor.sequenceParallel": 2},
        {
            **_JUDGED,
            "spec.training.maxTokensPerMicroBatch": 64,
            "spec.roles.actor.sequenceParallel": 2,
            f"{_PLACE}.sequenceParallel": 2,
        },
    ],
    "RLJobSpec.rewardModel.sequenceParallel": [{**_JUDGED, **_APART, f"{_PLACE}.sequenceParallel": 2}],
}

BAD: dict[str, list[Bad]] = {
    "RLJobSpec.rewardModelPool": [
        Bad(_POOL, {**_JUDGED, _POOL: "other"}),
        Bad(_POOL, {_POOL: "other"}),
    ],
    "Training.oneRewardModel": [Bad(_R, {_R: [_MODEL, _MODEL | {"name": "second"}]})],
    "RewardModel.revision": [
        Bad(
            _R + "[0].rewardModel.revision",
            {_R: [{"type": "RewardModel", "rewardModel": {"source": "./reward", "revision": "main"}}]},
        )
    ],
    "RLJobSpec.rewardModelUsed": [Bad(_POOL, each) for each in (_APART, {_POOL: "main"})],
    "RLJobSpec.rewardModelLayoutUsed": [
        Bad(_PLACE, {f"{_PLACE}.shardSize": 1}),
        Bad(_PLACE, {f"{_PLACE}.sequenceParallel": 1}),
    ],
    "RLJobSpec.rewardModel.shardSize": [
        Bad(f"{_PLACE}.shardSize", {**_JUDGED, **_APART, f"{_PLACE}.shardSize": 3}),
    ],
    "RLJobSpec.rewardModel.maxTokensPerMicroBatch": [
        Bad(
            f"{_PLACE}.sequenceParallel",
            {**_JUDGED, "spec.training.maxTokensPerMicroBatch": 64, "spec.roles.actor.sequenceParallel": 2},
        )
    ],
    "RLJobSpec.rewardModel.sequenceParallel": [
        Bad(f"{_PLACE}.sequenceParallel", {**_JUDGED, **_APART, f"{_PLACE}.sequenceParallel": 3}),
    ],
}
