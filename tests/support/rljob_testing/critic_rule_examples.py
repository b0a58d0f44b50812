"""The part of `rule_examples` about the critic."""

from __future__ import annotations

from collections.abc import Mapping

from rljob_testing.bad_job import Bad

_T = "spec.training."
_PPO = {_T + "algorithm.type": "PPO"}
_GAE = {_T + "algorithm.advantage.type": "GAE"}
_OWN = {_T + "algorithm.advantage": {"type": "Function", "function": {"path": "mine:own"}}}
_APART = {"spec.pools[1]": {"name": "second", "nodes": 1, "gpusPerNode": 2}, "spec.roles.critic.pool": "second"}
_OFFLOADED = {_T + "critic.model.offload.gradients": True}
_REVISION, _SOURCE = _T + "critic.model.revision", _T + "critic.model.source"

GOOD: dict[str, list[Mapping[str, object]]] = {
    "RLJobSpec.criticPool": [{**_PPO, **_APART}, {**_PPO, "spec.roles.critic.pool": "main"}],
    "Training.critic": [{**each, _T + "critic.valueClipRange": 0} for each in (_PPO, _GAE, _OWN)],
    "Training.criticWarmupSteps": [{**_PPO, _T + "critic.warmupSteps": 9}],
    "Training.criticOptimizerWarmupSteps": [{**_PPO, _T + "critic.optimizer.warmupSteps": 10}, _PPO],
    "CriticModel.revision": [{**_PPO, _REVISION: "main", _SOURCE: "owner/critic"}, {**_PPO, _SOURCE: "./critic"}],
    "RLJobSpec.criticUsed": [
        {**_PPO, **_APART},
        {**_OWN, **_APART},
        # The first pool is the default of a role that the job does not have.
        {
            "spec.pools[1]": {"name": "second"},
            "spec.roles": {"actor": {"pool": "second"}, "rollout": {"pool": "second"}},
            _T + "algorithm.kl.coefficient": 0.1,
        },
    ],
    "RLJobSpec.critic.offload.gradientsOfReplicas": [
        {**_PPO, **_OFFLOADED, "spec.roles.critic.shardSize": 2},
        {**_PPO, "spec.roles.critic.shardSize": 1},
    ],
    "RLJobSpec.critic.maxTokensPerMicroBatch": [
        {_T + "maxTokensPerMicroBatch": 64, "spec.roles.actor.sequenceParallel": 2},
        {
            **_PPO,
            _T + "maxTokensPerMicroBatch": 64,
            "spec.roles.actor.sequenceParallel": 2,
            "spec.roles.critic.sequenceParallel": 2,
        },
    ],
    "RLJobSpec.critic.miniBatchSize": [
        {**_PPO, **_APART, "spec.pools[1].gpusPerNode": 4},
        {**_PPO, **_APART, "spec.pools[1].gpusPerNode": 4, _T + "miniBatchSize": 1},
        {**_PPO, **_APART, "spec.pools[1].gpusPerNode": 3, "spec.roles.critic.sequenceParallel": 3},
    ],
}

BAD: dict[str, list[Bad]] = {
    "RLJobSpec.criticPool": [
        Bad("spec.roles.critic.pool", {**_PPO, "spec.roles.critic.pool": "other"}),
        Bad("spec.roles.critic.pool", {"spec.roles.critic.pool": "other"}),
    ],
    "Training.critic": [
        Bad(_T + "critic", {_T + "critic": {}}),
        Bad(_T + "critic", {**_PPO, _T + "algorithm.advantage.type": "GroupRelative", _T + "critic.warmupSteps": 1}),
    ],
    "Training.criticWarmupSteps": [Bad(_T + "critic.warmupSteps", {**_PPO, _T + "critic.warmupSteps": 10})],
    "Training.criticOptimizerWarmupSteps": [
        Bad(_T + "critic.optimizer.warmupSteps", {**_PPO, _T + "critic.optimizer.warmupSteps": 11})
    ],
    "CriticModel.revision": [
        Bad(_REVISION, {**_PPO, _REVISION: "main"}),
        Bad(_REVISION, {**_PPO, _REVISION: "main", _SOURCE: "./critic"}),
    ],
    "RLJobSpec.criticUsed": [
        Bad("spec.roles.critic.pool", each) for each in (_APART, {"spec.roles.critic.pool": "main"})
    ],
    "RLJobSpec.critic.offload.gradientsOfReplicas": [
        Bad(_T + "critic.model.offload.gradients", {**_PPO, **_OFFLOADED, "spec.roles.critic.shardSize": 1})
    ],
    "RLJobSpec.critic.maxTokensPerMicroBatch": [
        Bad(
            "spec.roles.critic.sequenceParallel",
            {**_PPO, _T + "maxTokensPerMicroBatch": 64, "spec.roles.actor.sequenceParallel": 2},
        )
    ],
    "RLJobSpec.critic.miniBatchSize": [
        Bad("spec.roles.critic", {**_PPO, **_APART, "spec.pools[1].gpusPerNode": 3}),
        Bad("spec.roles.critic", {**_PPO, **_APART, "spec.pools[1].gpusPerNode": 8, _T + "miniBatchSize": 1}),
    ],
}
