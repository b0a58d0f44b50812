"""Examples for the rules on the critic and the reward model, which are optional roles; part of `rule_examples`."""

from __future__ import annotations

from collections.abc import Mapping

from rljob_testing.jobs.valid_job import Bad

_T = "spec.training."
_PPO = {_T + "algorithm.type": "PPO"}
_GAE = {_T + "algorithm.advantage.type": "GAE"}
_OWN = {_T + "algorithm.advantage": {"type": "Function", "function": {"path": "mine:own"}}}
_CRITIC_APART = {"spec.pools[1]": {"name": "second", "nodes": 1, "gpusPerNode": 2}, "spec.roles.critic.pool": "second"}
_OFFLOADED = {_T + "critic.model.offload.gradients": True}
_REVISION, _SOURCE = _T + "critic.model.revision", _T + "critic.model.source"
_R = "spec.training.rewards"
_JUDGE = {"source": "owner/reward"}
_MODEL = {"type": "RewardModel", "rewardModel": _JUDGE}
_JUDGED = {_R: [_MODEL]}
_POOL = "spec.roles.rewardModel.pool"
_JUDGE_APART = {"spec.pools[1]": {"name": "second", "nodes": 1, "gpusPerNode": 2}, _POOL: "second"}
_PLACE = "spec.roles.rewardModel"
_TEACHER = "spec.roles.ref.model"
_DISTILLATION = {_T + "algorithm.type": "Distillation", _TEACHER: {"source": "owner/teacher"}}

GOOD: dict[str, list[Mapping[str, object]]] = {
    "RLJobSpec.teacher": [
        _DISTILLATION,
        {_T + "algorithm.advantage.type": "Distillation", _TEACHER: {"source": "./teacher"}},
        {**_DISTILLATION, _T + "rollout.groupSize": 1, _T + "rewards": []},
        {_T + "algorithm": {"type": "Distillation", "advantage": {"type": "GroupRelative"}}},
        {**_DISTILLATION, _T + "algorithm.kl.coefficient": 0.1},
    ],
    "ReferenceModel.revision": [
        {**_DISTILLATION, _TEACHER: {"source": "owner/teacher", "revision": "main"}},
        {**_DISTILLATION, _TEACHER: {"source": "./teacher"}},
    ],
    "RLJobSpec.criticPool": [{**_PPO, **_CRITIC_APART}, {**_PPO, "spec.roles.critic.pool": "main"}],
    "Training.critic": [{**each, _T + "critic.valueClipRange": 0} for each in (_PPO, _GAE, _OWN)],
    "Training.criticWarmupSteps": [{**_PPO, _T + "critic.warmupSteps": 9}],
    "Training.criticOptimizerWarmupSteps": [{**_PPO, _T + "critic.optimizer.warmupSteps": 10}, _PPO],
    "CriticModel.revision": [{**_PPO, _REVISION: "main", _SOURCE: "owner/critic"}, {**_PPO, _SOURCE: "./critic"}],
    "RLJobSpec.criticUsed": [
        {**_PPO, **_CRITIC_APART},
        {**_OWN, **_CRITIC_APART},
        # A role that the job does not have is on the first pool by default.
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
        {**_PPO, **_CRITIC_APART, "spec.pools[1].gpusPerNode": 4},
        {**_PPO, **_CRITIC_APART, "spec.pools[1].gpusPerNode": 4, _T + "miniBatchSize": 1},
        {**_PPO, **_CRITIC_APART, "spec.pools[1].gpusPerNode": 3, "spec.roles.critic.sequenceParallel": 3},
    ],
    "RLJobSpec.rewardModelPool": [{**_JUDGED, **_JUDGE_APART}, {**_JUDGED, _POOL: "main"}],
    "Training.oneRewardModel": [{_R: [_MODEL, {"name": "exact", "type": "MathAnswer"}]}],
    "RewardModel.revision": [
        {_R: [{"type": "RewardModel", "rewardModel": _JUDGE | {"revision": "main"}}]},
        {_R: [{"type": "RewardModel", "rewardModel": {"source": "./reward"}}]},
    ],
    "RLJobSpec.rewardModelUsed": [{**_JUDGED, **_JUDGE_APART}, {**_JUDGED, _POOL: "main"}],
    "RLJobSpec.rewardModelLayoutUsed": [{**_JUDGED, f"{_PLACE}.shardSize": 1}, {**_JUDGED, f"{_PLACE}.pool": "main"}],
    "RLJobSpec.rewardModel.shardSize": [{**_JUDGED, **_JUDGE_APART, f"{_PLACE}.shardSize": 1}],
    "RLJobSpec.rewardModel.maxTokensPerMicroBatch": [
        {"spec.training.maxTokensPerMicroBatch": 64, "spec.roles.actor.sequenceParallel": 2},
        {
            **_JUDGED,
            "spec.training.maxTokensPerMicroBatch": 64,
            "spec.roles.actor.sequenceParallel": 2,
            f"{_PLACE}.sequenceParallel": 2,
        },
    ],
    "RLJobSpec.rewardModel.sequenceParallel": [{**_JUDGED, **_JUDGE_APART, f"{_PLACE}.sequenceParallel": 2}],
}

BAD: dict[str, list[Bad]] = {
    "RLJobSpec.teacher": [
        Bad(_TEACHER, {_T + "algorithm.type": "Distillation"}),
        Bad(_TEACHER, {_T + "algorithm.advantage.type": "Distillation", _T + "rewards": []}),
    ],
    "ReferenceModel.revision": [
        Bad(_TEACHER + ".revision", {**_DISTILLATION, _TEACHER: {"source": "./teacher", "revision": "main"}}),
    ],
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
        Bad("spec.roles.critic.pool", each) for each in (_CRITIC_APART, {"spec.roles.critic.pool": "main"})
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
        Bad("spec.roles.critic", {**_PPO, **_CRITIC_APART, "spec.pools[1].gpusPerNode": 3}),
        Bad("spec.roles.critic", {**_PPO, **_CRITIC_APART, "spec.pools[1].gpusPerNode": 8, _T + "miniBatchSize": 1}),
    ],
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
    "RLJobSpec.rewardModelUsed": [Bad(_POOL, each) for each in (_JUDGE_APART, {_POOL: "main"})],
    "RLJobSpec.rewardModelLayoutUsed": [
        Bad(_PLACE, {f"{_PLACE}.shardSize": 1}),
        Bad(_PLACE, {f"{_PLACE}.sequenceParallel": 1}),
    ],
    "RLJobSpec.rewardModel.shardSize": [
        Bad(f"{_PLACE}.shardSize", {**_JUDGED, **_JUDGE_APART, f"{_PLACE}.shardSize": 3}),
    ],
    "RLJobSpec.rewardModel.maxTokensPerMicroBatch": [
        Bad(
            f"{_PLACE}.sequenceParallel",
            {**_JUDGED, "spec.training.maxTokensPerMicroBatch": 64, "spec.roles.actor.sequenceParallel": 2},
        )
    ],
    "RLJobSpec.rewardModel.sequenceParallel": [
        Bad(f"{_PLACE}.sequenceParallel", {**_JUDGED, **_JUDGE_APART, f"{_PLACE}.sequenceParallel": 3}),
    ],
}
