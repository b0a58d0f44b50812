"""Examples for the rules on pools of roles, layouts, offload and batch sizes; part of `rule_examples`."""

from __future__ import annotations

from collections.abc import Mapping

from rljob_testing.jobs.valid_job import Bad

_T = "spec.training."
_APART = {"actor": {"pool": "second"}, "rollout": {"pool": "second"}, "ref": {"pool": "main"}}
_SECOND = {"spec.pools[1]": {"name": "second"}}
_PARALLEL, _ENGINE = "spec.roles.rollout.tensorParallel", _T + "rollout.engine"
_RESOURCE = "spec.pools[0].gpuResource"
_MAKES: dict[str, Mapping[str, object]] = {
    "actor": {},
    "ref": {_T + "algorithm.kl.coefficient": 0.1},
    "critic": {_T + "algorithm.type": "PPO"},
}
"""For each role, the edits that give a job this role."""
_LAYOUT_FIELDS = ("shardSize", "sequenceParallel")
_GRADIENTS, _REFERENCE = "spec.training.model.offload.gradients", "spec.training.model.offload.reference"
_DEFERRED = "spec.roles.actor.deferGradientReduction"
_TEACHER = {"spec.roles.ref.model": {"source": "owner/teacher"}}
_DISTILLATION = {**_TEACHER, _T + "algorithm.type": "Distillation"}
_LORA = {"spec.training.model.lora": {}, "spec.training.algorithm.kl.coefficient": 0.1}
_SHARD_SIZE, _GPUS = "spec.roles.actor.shardSize", "spec.pools[0].gpusPerNode"

_CONVERSATION: Mapping[str, object] = {
    _T + "environment": {"type": "Class", "classes": [{"path": "my_games:Guess"}], "maxContextTokens": 100}
}

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
    "RLJobSpec.tensorParallel": [{_PARALLEL: 2}],
    "RLJobSpec.tensorParallelOnMig": [
        {_PARALLEL: 1, _RESOURCE: "nvidia.com/mig-3g.40gb"},
        {_PARALLEL: 2, _RESOURCE: "amd.com/gpu"},
        {
            **_SECOND,
            _RESOURCE: "nvidia.com/mig-1g.10gb",
            "spec.pools[1].gpusPerNode": 2,
            "spec.roles": {**_APART, "rollout": {"pool": "second", "tensorParallel": 2}},
            _T + "algorithm.kl.coefficient": 0.1,
        },
    ],
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
            {**_MAKES[role], **_TEACHER, **_MAKES["ref"]},
        ]
        for role in ("ref", "critic")
    },
    "RLJobSpec.offload.reference": [
        {_REFERENCE: True, "spec.training.algorithm.kl.coefficient": 0.1},
        {_REFERENCE: True, **_DISTILLATION},
        {_REFERENCE: False},
    ],
    "RLJobSpec.offload.referenceOfAdapters": [
        _LORA,
        {**_LORA, _REFERENCE: True, "spec.roles.ref.shardSize": 1},
        {**_LORA, _REFERENCE: True, **_TEACHER},
        {**_LORA, _REFERENCE: True, "spec.pools[1]": {"name": "second"}, "spec.roles.ref.pool": "second"},
    ],
    "RLJobSpec.offload.gradients": [{_GRADIENTS: True}, {_DEFERRED: True}],
    "RLJobSpec.offload.gradientsOfReplicas": [
        {_GRADIENTS: True, _GPUS: 2, _SHARD_SIZE: 2},
        {_GPUS: 2, _SHARD_SIZE: 1},
    ],
    "RLJobSpec.batchSize": [
        {"spec.pools[0].nodes": 2, "spec.pools[0].gpusPerNode": 4},
        # 8 prompts with 4 responses each on 16 GPUs: fewer prompts than GPUs is valid.
        {"spec.pools[0].nodes": 2, "spec.pools[0].gpusPerNode": 8, "spec.roles.rollout.tensorParallel": 2},
        # 28 responses on 2 GPUs: the responses of one group may be on both.
        {_T + "batchSize": 7},
        # 4 responses on 8 GPUs, in pairs that share rows.
        {_GPUS: 8, "spec.roles.actor.sequenceParallel": 2, _T + "batchSize": 1},
    ],
    "RLJobSpec.miniBatchSize": [{_T + "miniBatchSize": 2}, {_T + "miniBatchSize": 1}],
    "Training.miniBatchSize": [{_T + "miniBatchSize": 4}, {_T + "miniBatchSize": 8}],
    "RLJobSpec.maxTokensPerMicroBatch": [
        {_T + "maxTokensPerMicroBatch": 128},
        {_T + "maxTokensPerMicroBatch": 100, **_CONVERSATION},
        {_T + "maxTokensPerMicroBatch": 64, "spec.roles.actor.sequenceParallel": 2},
    ],
    "RLJobSpec.ref.maxTokensPerMicroBatch": [
        {
            _T + "maxTokensPerMicroBatch": 64,
            _T + "algorithm.kl.coefficient": 0.1,
            **{f"spec.roles.{role}.sequenceParallel": 2 for role in ("actor", "ref")},
        },
        {
            _T + "maxTokensPerMicroBatch": 64,
            _T + "algorithm.kl.coefficient": 0.1,
            _T + "model.lora": {},
            "spec.roles.actor.sequenceParallel": 2,
        },
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
        # The misspelled name leaves the second pool without a role.
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
        # Roles that this job does not have are on the first pool by default.
        Bad(
            "spec.pools",
            {**_SECOND, "spec.roles": {role: {"pool": "second"} for role in ("actor", "rollout")}},
            places=("spec.pools[0].name",),
        ),
    ],
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
            *(Bad(f"spec.roles.{role}", {f"spec.roles.{role}.{field}": 1}) for field in _LAYOUT_FIELDS),
            *([Bad("spec.roles.ref", _TEACHER)] if role == "ref" else []),
        ]
        for role in ("ref", "critic")
    },
    "RLJobSpec.tensorParallelOnMig": [Bad(_PARALLEL, {_PARALLEL: 2, _RESOURCE: "nvidia.com/mig-3g.40gb.shared"})],
    "RLJobSpec.tensorParallelEngine": [Bad(_PARALLEL, {_PARALLEL: 2, _ENGINE: "HuggingFace"})],
    "RLJobSpec.offload.reference": [Bad(_REFERENCE, {_REFERENCE: True})],
    "RLJobSpec.offload.referenceOfAdapters": [
        Bad(_REFERENCE, {**_LORA, _REFERENCE: True}),
        Bad(_REFERENCE, {**_LORA, _REFERENCE: True, "spec.roles.ref.pool": "main"}),
    ],
    "RLJobSpec.offload.gradients": [Bad(_GRADIENTS, {_GRADIENTS: True, _DEFERRED: True})],
    "RLJobSpec.offload.gradientsOfReplicas": [Bad(_GRADIENTS, {_GRADIENTS: True, _GPUS: 2, _SHARD_SIZE: 1})],
    "RLJobSpec.batchSize": [
        Bad(_T + "batchSize", {_T + "batchSize": 7, _T + "rollout.groupSize": 3}),
        Bad(_T + "batchSize", {"spec.pools[0].nodes": 3}),
        # The critic uses the actor's pool, so only the actor's message is reported.
        Bad(_T + "batchSize", {"spec.pools[0].nodes": 3, _T + "algorithm.type": "PPO"}),
        # 8 responses on 4 replicas of 4 GPUs divide over the replicas, but not over the 16 GPUs, each of which has its
        # own rows.
        Bad(
            _T + "batchSize",
            {
                "spec.pools[0].nodes": 2,
                "spec.pools[0].gpusPerNode": 8,
                "spec.roles.rollout.tensorParallel": 4,
                _T + "batchSize": 2,
            },
        ),
    ],
    "RLJobSpec.miniBatchSize": [
        Bad(_T + "miniBatchSize", {_T + "miniBatchSize": 1, "spec.pools[0].gpusPerNode": 8}),
        # The whole batch of 16 responses divides over 16 GPUs; a mini-batch of 8 does not.
        Bad(
            _T + "miniBatchSize",
            {"spec.pools[0].nodes": 2, "spec.pools[0].gpusPerNode": 8, _T + "batchSize": 4, _T + "miniBatchSize": 2},
        ),
    ],
    "Training.miniBatchSize": [Bad(_T + "miniBatchSize", {_T + "miniBatchSize": 6})],
    "RLJobSpec.maxTokensPerMicroBatch": [
        Bad(_T + "maxTokensPerMicroBatch", {_T + "maxTokensPerMicroBatch": 127}),
        Bad(_T + "maxTokensPerMicroBatch", {_T + "maxTokensPerMicroBatch": 99, **_CONVERSATION}),
        Bad(_T + "maxTokensPerMicroBatch", {_T + "maxTokensPerMicroBatch": 127, _T + "algorithm.type": "PPO"}),
        Bad(
            _T + "maxTokensPerMicroBatch",
            {_T + "maxTokensPerMicroBatch": 63, "spec.roles.actor.sequenceParallel": 2},
        ),
    ],
    "RLJobSpec.ref.maxTokensPerMicroBatch": [
        Bad(
            "spec.roles.ref.sequenceParallel",
            {
                _T + "maxTokensPerMicroBatch": 64,
                _T + "algorithm.kl.coefficient": 0.1,
                "spec.roles.actor.sequenceParallel": 2,
            },
        )
    ],
}
