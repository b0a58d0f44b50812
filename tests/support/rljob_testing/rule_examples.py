"""For every rule of the API jobs that keep it and jobs that break it, as changes of a small valid job.

The table is run through pydantic and through a real API server; both must give the verdict written here.
"""

from __future__ import annotations

from collections.abc import Mapping

from rljob_testing import (
    algorithm_rule_examples,
    critic_rule_examples,
    dynamic_sampling_rule_examples,
    layout_rule_examples,
    offload_rule_examples,
    placement_rule_examples,
    pod_rule_examples,
    reward_model_rule_examples,
    reward_rule_examples,
    union_rule_examples,
)
from rljob_testing.bad_job import Bad

_T = "spec.training."
_TOLERATIONS = "spec.pools[0].template.tolerations"
_ENV = "spec.env"
_GPUS = "spec.pools[0].gpusPerNode"
_SECRET = {"name": "credentials", "key": "token"}
_GYM = {"type": "ReasoningGym", "reasoningGym": {"task": "basic_arithmetic"}}
_CLAIM = {"name": "data", "mountPath": "/data", "type": "PersistentVolumeClaim"}
_CLAIMED = _CLAIM | {"persistentVolumeClaim": {"claimName": "data"}}
_SCRATCH = {"name": "scratch", "mountPath": "/scratch", "type": "EmptyDir", "emptyDir": {}}

GOOD: dict[str, list[Mapping[str, object]]] = {
    **algorithm_rule_examples.GOOD,
    **critic_rule_examples.GOOD,
    **layout_rule_examples.GOOD,
    **dynamic_sampling_rule_examples.GOOD,
    **offload_rule_examples.GOOD,
    **placement_rule_examples.GOOD,
    **pod_rule_examples.GOOD,
    **reward_rule_examples.GOOD,
    **reward_model_rule_examples.GOOD,
    **union_rule_examples.GOOD,
    "Metadata.name": [{"metadata.name": "a" * 46}, {"metadata.name": "a"}, {"metadata.name": "a-0"}],
    "RLJobSpec.env.name": [{_ENV: [{"name": "A", "value": "1"}, {"name": "B", "value": "1"}]}],
    "RLJobSpec.volumes.name": [{"spec.volumes": [_CLAIMED, _SCRATCH]}],
    "RLJobSpec.volumes.mountPath": [{"spec.volumes": [_CLAIMED, _SCRATCH]}],
    "RLJobSpec.batchSize": [
        {"spec.pools[0].nodes": 2, "spec.pools[0].gpusPerNode": 4},
        # 8 prompts of 4 responses over 16 GPUs: fewer prompts than GPUs.
        {"spec.pools[0].nodes": 2, "spec.pools[0].gpusPerNode": 8, "spec.roles.rollout.tensorParallel": 2},
        # 28 responses over 2 GPUs: a group may be trained on in two places.
        {_T + "batchSize": 7},
        # 4 responses over 8 GPUs of which two share rows.
        {_GPUS: 8, "spec.roles.actor.sequenceParallel": 2, _T + "batchSize": 1},
    ],
    "RLJobSpec.miniBatchSize": [{_T + "miniBatchSize": 2}, {_T + "miniBatchSize": 1}],
    "Pool.nameNotHead": [{"spec.pools[0].name": "head2"}],
    "Pool.gpusNotInResources": [
        {"spec.pools[0].resources": {"requests": {"cpu": 4, "memory": "16Gi"}, "limits": {"memory": "16Gi"}}}
    ],
    "PodOverlay.labels": [
        {"spec.pools[0].template.labels": {"team": "a", "example.com/rljob.dev": "b", "app.kubernetes.io/name": "c"}}
    ],
    "PodOverlay.annotations": [{"spec.pools[0].template.annotations": {"kueue.x-k8s.io/podset-group-name": "a"}}],
    "Toleration.existsHasNoValue": [
        {_TOLERATIONS: [{"key": "gpu", "operator": "Exists"}]},
        {_TOLERATIONS: [{"key": "gpu", "operator": "Exists", "value": ""}]},
        {_TOLERATIONS: [{"key": "gpu", "value": "a100"}]},
    ],
    "Toleration.equalHasKey": [{_TOLERATIONS: [{"operator": "Exists"}]}],
    "Toleration.secondsOnlyForNoExecute": [
        {_TOLERATIONS: [{"key": "gpu", "effect": "NoExecute", "tolerationSeconds": 30}]}
    ],
    "EnvVar.nameNotOwned": [
        {_ENV: [{"name": "TOKENIZERS_PARALLELISM", "value": "false"}]},
        {_ENV: [{"name": "MY_RAY_FLAG", "value": "1"}]},
    ],
    "EnvVar.secretByReference": [
        {_ENV: [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": _SECRET}}]},
        {_ENV: [{"name": "MAX_TOKENS", "value": "3"}, {"name": "KEYBOARD", "value": "us"}]},
        *({_ENV: [{"name": name, "value": "3"}]} for name in ("MONKEY", "DATA_TURKEY", "HotKey", "PUBLICKEY")),
        *({_ENV: [{"name": name, "value": "</s>"}]} for name in ("EOS_TOKEN", "JUDGE_PAD_TOKEN", "stop_token")),
        *({_ENV: [{"name": name, "value": "id"}]} for name in ("SORT_KEY", "DATA_PRIMARY_KEY", "ForeignKey")),
    ],
    "EnvVar.exactlyOne": [{_ENV: [{"name": "EMPTY", "value": ""}]}],
    "EnvSource.exactlyOne": [{_ENV: [{"name": "A", "valueFrom": {"configMapKeyRef": _SECRET}}]}],
    "EnvFrom.prefixNotOwned": [
        {"spec.envFrom": [{"secretRef": {"name": "all"}, "prefix": prefix}]} for prefix in ("MY_RAY_", "RL", "KUBE_")
    ],
    "EnvFrom.exactlyOne": [
        {"spec.envFrom": [{"secretRef": {"name": "all"}}, {"configMapRef": {"name": "all"}, "prefix": "P_"}]}
    ],
    "Code.exactlyOne": [
        {"spec.code": {"configMap": "rewards"}},
        {"spec.code": {"persistentVolumeClaim": "code"}},
        {"spec.code": {"imagePath": "/opt/code"}},
    ],
    "Volume.nameNotOwned": [{"spec.volumes": [_SCRATCH | {"name": "my-rljob-data"}]}],
    "Volume.mountPathNotOwned": [
        {"spec.volumes": [_SCRATCH | {"mountPath": path}]}
        for path in ("/tmp/rays", "/rljobs", "/var/cache", "/data/..x", "/device/", "/opt/dev/tmp")
    ],
    "Volume.subPath": [
        {"spec.volumes": [_CLAIMED | {"subPath": "a/b..c"}]},
        {"spec.volumes": [_CLAIMED | {"subPath": "..."}]},
    ],
    "CheckpointStorage.subPath": [
        {"spec.checkpoint.storage": {"persistentVolumeClaim": "ckpt", "subPath": "team/run"}},
        {"spec.checkpoint.storage": {"persistentVolumeClaim": "ckpt"}},
    ],
    "Model.revision": [
        {_T + "model": {"source": "owner/model", "revision": "main"}},
        {_T + "model": {"source": "/models/mine"}},
        {_T + "model": {"source": "package://my_models/small"}},
    ],
    "HuggingFaceDataset.revision": [
        {_T + "dataset": {"type": "HuggingFace", "huggingFace": {"path": "owner/data", "revision": "v1"}}}
    ],
    "Dataset.promptTemplate": [
        {_T + "dataset.promptTemplate": "Question: {prompt}\nAnswer:"},
        {_T + "dataset.promptTemplate": "{ {prompt} {other}"},
    ],
    "Training.miniBatchSize": [{_T + "miniBatchSize": 4}, {_T + "miniBatchSize": 8}],
    "Model.gradientCheckpointingEveryNthLayer": [
        {_T + "model.gradientCheckpointing": True, _T + "model.gradientCheckpointingEveryNthLayer": 2},
        {_T + "model.gradientCheckpointing": True},
        {_T + "model.gradientCheckpointingEveryNthLayer": 1},
    ],
    "Training.warmupSteps": [
        {_T + "optimizer.warmupSteps": 10},
        {_T + "algorithm.type": "PPO", _T + "critic.warmupSteps": 4, _T + "optimizer.warmupSteps": 6},
    ],
    # 64 prompt tokens and 64 new ones.
    "Training.timelineSteps": [{_T + "timelineSteps": [1, 10]}],
    "Rollout.cpuKvCache": [
        {_T + "rollout.cpuKvCache": memory}
        for memory in ("4Gi", "0.5Gi", "00.01Mi", 1, 1073741824, "1", "100k", "+.5e9", "1.")
    ],
    "Training.loraSync": [
        {_T + "model.lora": {"sync": "Adapter"}},
        {_T + "model.lora": {"sync": "Adapter"}, _T + "rollout.engine": "VLLM"},
        {_T + "model.lora": {}, _T + "rollout.engine": "HuggingFace"},
    ],
    "RLJobSpec.maxTokensPerMicroBatch": [
        {_T + "maxTokensPerMicroBatch": 128},
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
    **algorithm_rule_examples.BAD,
    **critic_rule_examples.BAD,
    **layout_rule_examples.BAD,
    **dynamic_sampling_rule_examples.BAD,
    **offload_rule_examples.BAD,
    **placement_rule_examples.BAD,
    **pod_rule_examples.BAD,
    **reward_rule_examples.BAD,
    **reward_model_rule_examples.BAD,
    **union_rule_examples.BAD,
    "Metadata.name": [
        Bad("metadata.name", {"metadata.name": "a" * 47}),
        Bad("metadata.name", {"metadata.name": "a.b"}),
        # Names of services begin with a letter.
        Bad("metadata.name", {"metadata.name": "8b"}),
    ],
    "RLJobSpec.env.name": [
        Bad(
            _ENV,
            {_ENV: [{"name": name, "value": "1"} for name in ("A", "B", "A")]},
            places=(_ENV + "[0].name", _ENV + "[2].name"),
        )
    ],
    "RLJobSpec.volumes.name": [
        Bad(
            "spec.volumes",
            {"spec.volumes": [_CLAIMED, _SCRATCH | {"name": "data"}]},
            places=("spec.volumes[0].name", "spec.volumes[1].name"),
        )
    ],
    "RLJobSpec.volumes.mountPath": [
        Bad(
            "spec.volumes",
            {"spec.volumes": [_CLAIMED, _SCRATCH | {"mountPath": "/data"}]},
            places=("spec.volumes[0].mountPath", "spec.volumes[1].mountPath"),
        )
    ],
    "RLJobSpec.batchSize": [
        Bad(_T + "batchSize", {_T + "batchSize": 7, _T + "rollout.groupSize": 3}),
        Bad(_T + "batchSize", {"spec.pools[0].nodes": 3}),
        # The critic is where the actor is, and nothing is to be said of it.
        Bad(_T + "batchSize", {"spec.pools[0].nodes": 3, _T + "algorithm.type": "PPO"}),
        # 8 responses for 4 replicas of 4 GPUs: even over the replicas, but the 16 GPUs each train on rows of their own.
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
        # The whole batch of 16 responses divides over 16 GPUs, a mini-batch of 8 does not.
        Bad(
            _T + "miniBatchSize",
            {"spec.pools[0].nodes": 2, "spec.pools[0].gpusPerNode": 8, _T + "batchSize": 4, _T + "miniBatchSize": 2},
        ),
    ],
    "Pool.nameNotHead": [
        Bad("spec.pools[0].name", {"spec.pools[0].name": "head"}),
        Bad("spec.pools[0].name", {"spec.pools[0].name": "headgroup"}),
    ],
    "Pool.gpusNotInResources": [
        Bad("spec.pools[0].resources", {"spec.pools[0].resources.limits": {"nvidia.com/gpu": 2}}),
        Bad(
            "spec.pools[0].resources",
            {"spec.pools[0].gpuResource": "amd.com/gpu", "spec.pools[0].resources.requests": {"amd.com/gpu": "2"}},
            also=("Resources.notShared",),
        ),
    ],
    "PodOverlay.labels": [
        Bad("spec.pools[0].template.labels", {"spec.pools[0].template.labels": {"rljob.dev/job": "x"}}),
        Bad("spec.head.template.labels", {"spec.head.template.labels": {"ray.io/cluster": "x"}}),
        Bad("spec.head.template.labels", {"spec.head.template.labels": {"app.kubernetes.io/created-by": "x"}}),
    ],
    "PodOverlay.annotations": [
        Bad(
            "spec.head.template.annotations",
            {"spec.head.template.annotations": {"ray.io/overwrite-container-cmd": "true"}},
        ),
    ],
    "Toleration.existsHasNoValue": [
        Bad(_TOLERATIONS + "[0].value", {_TOLERATIONS: [{"key": "gpu", "operator": "Exists", "value": "a"}]})
    ],
    "Toleration.equalHasKey": [Bad(_TOLERATIONS + "[0].key", {_TOLERATIONS: [{"effect": "NoSchedule"}]})],
    "Toleration.secondsOnlyForNoExecute": [
        Bad(_TOLERATIONS + "[0].tolerationSeconds", {_TOLERATIONS: [{"key": "gpu", "tolerationSeconds": 30}]})
    ],
    "EnvVar.nameNotOwned": [
        Bad(_ENV + "[0].name", {_ENV: [{"name": "RLJOB_SPEC", "value": "{}"}]}),
        Bad(_ENV + "[0].name", {_ENV: [{"name": "LD_PRELOAD", "value": "/x.so"}]}),
    ],
    "EnvVar.secretByReference": [
        Bad(_ENV + "[0].value", {_ENV: [{"name": "HF_TOKEN", "value": "abc"}]}),
        *(
            Bad(_ENV + "[0].value", {_ENV: [{"name": name, "value": "abc"}]})
            for name in ("wandb_api_key", "KEY", "OPENAI_APIKEY", "AwsAccessKey", "AUTHTOKEN", "PGPASSWORD", "_KEY")
        ),
        *(
            Bad(_ENV + "[0].value", {_ENV: [{"name": name, "value": "abc"}]})
            for name in ("OPENAIKEY", "HFKEY", "AWSKEY", "MYKEY", "wandbKey", "MONKEYKEY", "APIMONKEY", "VIDEOS_TOKEN")
        ),
    ],
    "EnvVar.exactlyOne": [
        Bad(_ENV + "[0]", {_ENV: [{"name": "A"}]}),
        Bad(_ENV + "[0]", {_ENV: [{"name": "A", "value": "1", "valueFrom": {"secretKeyRef": _SECRET}}]}),
    ],
    "EnvSource.exactlyOne": [
        Bad(_ENV + "[0].valueFrom", {_ENV: [{"name": "A", "valueFrom": {}}]}),
        Bad(
            _ENV + "[0].valueFrom",
            {_ENV: [{"name": "A", "valueFrom": {"secretKeyRef": _SECRET, "configMapKeyRef": _SECRET}}]},
        ),
    ],
    "EnvFrom.prefixNotOwned": [
        Bad("spec.envFrom[0].prefix", {"spec.envFrom": [{"prefix": prefix, "secretRef": {"name": "a"}}]})
        for prefix in ("RLJOB_", "RAY_", "RAY_AUTH_", "KUBERAY_")
    ],
    "EnvFrom.exactlyOne": [
        Bad("spec.envFrom[0]", {"spec.envFrom": [{"prefix": "P_"}]}),
        Bad("spec.envFrom[0]", {"spec.envFrom": [{"secretRef": {"name": "a"}, "configMapRef": {"name": "a"}}]}),
    ],
    "Code.exactlyOne": [
        Bad("spec.code", {"spec.code": {}}),
        Bad("spec.code", {"spec.code": {"configMap": "a", "imagePath": "/a"}}),
    ],
    "Volume.nameNotOwned": [Bad("spec.volumes[0].name", {"spec.volumes": [_SCRATCH | {"name": "rljob-storage"}]})],
    "Volume.mountPathNotOwned": [
        Bad("spec.volumes[0].mountPath", {"spec.volumes": [_SCRATCH | {"mountPath": path}]})
        for path in (
            *(
                "/",
                "/tmp",
                "/tmp/",
                "/tmp/ray",
                "/tmp/ray/x",
                "/dev/shm",
                "/rljob",
                "/rljob/storage/x",
                "/sys",
                "/proc/",
            ),
            *("/data//x", "/data/../dev", "/data/.", "//", "/a:b"),
        )
    ],
    "Volume.subPath": [
        Bad("spec.volumes[0].subPath", {"spec.volumes": [_CLAIMED | {"subPath": "../x"}]}),
        Bad("spec.volumes[0].subPath", {"spec.volumes": [_CLAIMED | {"subPath": "/x"}]}),
    ],
    "CheckpointStorage.subPath": [
        Bad(
            "spec.checkpoint.storage.subPath",
            {"spec.checkpoint.storage": {"persistentVolumeClaim": "ckpt", "subPath": "a/../.."}},
        )
    ],
    "Model.revision": [
        Bad(_T + "model.revision", {_T + "model": {"source": "./mine", "revision": "main"}}),
        Bad(_T + "model.revision", {_T + "model": {"source": "package://my_models/small", "revision": "main"}}),
    ],
    "HuggingFaceDataset.revision": [
        Bad(
            _T + "dataset.huggingFace.revision",
            {_T + "dataset": {"type": "HuggingFace", "huggingFace": {"path": "/data", "revision": "v1"}}},
        )
    ],
    "Dataset.promptTemplate": [
        Bad(_T + "dataset.promptTemplate", {_T + "dataset.promptTemplate": "Question:"}),
        Bad(_T + "dataset.promptTemplate", {_T + "dataset.promptTemplate": "{prompt}{prompt}"}),
    ],
    "Training.miniBatchSize": [Bad(_T + "miniBatchSize", {_T + "miniBatchSize": 6})],
    "Model.gradientCheckpointingEveryNthLayer": [
        Bad(
            _T + "model.gradientCheckpointingEveryNthLayer",
            {_T + "model.gradientCheckpointingEveryNthLayer": 2},
        )
    ],
    "Training.warmupSteps": [
        Bad(_T + "optimizer.warmupSteps", {_T + "optimizer.warmupSteps": 11}),
        Bad(
            _T + "optimizer.warmupSteps",
            {_T + "algorithm.type": "PPO", _T + "critic.warmupSteps": 4, _T + "optimizer.warmupSteps": 7},
        ),
    ],
    "Training.timelineSteps": [Bad(_T + "timelineSteps", {_T + "timelineSteps": [11]})],
    "Rollout.cpuKvCache": [
        Bad(_T + "rollout.cpuKvCache", {_T + "rollout.cpuKvCache": memory})
        for memory in ("0", 0, "0Gi", "0.00Mi", "00k", "0m", "0e3", ".0", "+0.")
    ],
    "Training.loraSync": [
        Bad(_T + "model.lora.sync", {_T + "model.lora": {"sync": "Adapter"}, _T + "rollout.engine": "HuggingFace"})
    ],
    "RLJobSpec.maxTokensPerMicroBatch": [
        Bad(_T + "maxTokensPerMicroBatch", {_T + "maxTokensPerMicroBatch": 127}),
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
