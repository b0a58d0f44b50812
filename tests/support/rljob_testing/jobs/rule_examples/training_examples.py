"""Examples for the rules on dataset, model, number of steps and job name; part of `rule_examples`."""

from __future__ import annotations

from collections.abc import Mapping

from rljob_testing.jobs.valid_job import Bad

_T = "spec.training."
_HELD_OUT = {"type": "File", "file": {"path": "held_out.jsonl"}}
_BUCKET = {
    "bucket": "team-checkpoints",
    "prefix": "rl/run_1",
    "endpoint": "https://minio.example:9000",
    "region": "eu-central-1",
    "secret": "bucket",
}

GOOD: dict[str, list[Mapping[str, object]]] = {
    "Metadata.name": [{"metadata.name": "a" * 46}, {"metadata.name": "a"}, {"metadata.name": "a-0"}],
    "CheckpointStorage.subPath": [
        {"spec.checkpoint.storage": {"persistentVolumeClaim": "ckpt", "subPath": "team/run"}},
        {"spec.checkpoint.storage": {"persistentVolumeClaim": "ckpt"}},
    ],
    "CheckpointStorage.exactlyOne": [
        {"spec.checkpoint.storage": {"s3": {"bucket": "ckpt"}}},
        {"spec.checkpoint.storage": {"s3": _BUCKET}},
    ],
    "CheckpointStorage.subPathOfClaim": [
        {"spec.checkpoint.storage": {"persistentVolumeClaim": "ckpt", "subPath": "team"}},
    ],
    "Model.revision": [
        {_T + "model": {"source": "owner/model", "revision": "main"}},
        {_T + "model": {"source": "/models/mine"}},
        {_T + "model": {"source": "package://my_models/small"}},
        {_T + "model": {"source": "run:///runs/small@step-20"}},
    ],
    "HuggingFaceDataset.revision": [
        {_T + "dataset": {"type": "HuggingFace", "huggingFace": {"path": "owner/data", "revision": "v1"}}}
    ],
    "Dataset.promptTemplate": [
        {_T + "dataset.promptTemplate": "Question: {prompt}\nAnswer:"},
        {_T + "dataset.promptTemplate": "{ {prompt} {other}"},
    ],
    "Model.gradientCheckpointingEveryNthLayer": [
        {_T + "model.gradientCheckpointing": "Always", _T + "model.gradientCheckpointingEveryNthLayer": 2},
        {_T + "model.gradientCheckpointing": "Always"},
        {_T + "model.gradientCheckpointingEveryNthLayer": 2},
        {_T + "model.gradientCheckpointing": "Never", _T + "model.gradientCheckpointingEveryNthLayer": 1},
    ],
    "Training.warmupSteps": [
        {_T + "optimizer.warmupSteps": 10},
        {_T + "algorithm.type": "PPO", _T + "critic.warmupSteps": 4, _T + "optimizer.warmupSteps": 6},
    ],
    "Training.evaluationsOnly": [{_T + "steps": 0, _T + "evaluations": [{"dataset": _HELD_OUT}]}, {_T + "steps": 1}],
    "Training.timelineSteps": [{_T + "timelineSteps": [1, 10]}],
    "Training.profileSteps": [{_T + "profile": {"steps": [1, 10], "ranks": [0, 1], "type": "Nsys"}}],
    "Training.trackers.type": [{_T + "trackers": [{"type": "WandB"}, {"type": "MLflow"}]}],
    "Tracker.blocks": [
        {_T + "trackers": [{"type": "WandB"}, {"type": "MLflow"}]},
        {_T + "trackers": [{"type": "MLflow", "mlflow": {}}, {"type": "WandB", "wandb": {"mode": "Offline"}}]},
    ],
    "Rollout.cpuKvCache": [
        {_T + "rollout.cpuKvCache": memory}
        for memory in ("4Gi", "0.5Gi", "00.01Mi", 1, 1073741824, "1", "100k", "+.5e9", "1.")
    ],
    "Lora.latentProjection": [
        {_T + "model.lora": {"sync": "Merged", "targets": ["kv_b_proj"]}},
        {_T + "model.lora": {"sync": "Adapter", "targets": ["o_proj", "other_kv_b_proj"]}},
    ],
    "Training.loraSync": [
        {_T + "model.lora": {"sync": "Adapter"}},
        {_T + "model.lora": {"sync": "Adapter"}, _T + "rollout.engine": "VLLM"},
        {_T + "model.lora": {}, _T + "rollout.engine": "HuggingFace"},
    ],
}

BAD: dict[str, list[Bad]] = {
    "Metadata.name": [
        Bad("metadata.name", {"metadata.name": "a" * 47}),
        Bad("metadata.name", {"metadata.name": "a.b"}),
        # Names of Kubernetes services must begin with a letter.
        Bad("metadata.name", {"metadata.name": "8b"}),
    ],
    "CheckpointStorage.subPath": [
        Bad(
            "spec.checkpoint.storage.subPath",
            {"spec.checkpoint.storage": {"persistentVolumeClaim": "ckpt", "subPath": "a/../.."}},
        )
    ],
    "CheckpointStorage.exactlyOne": [
        Bad("spec.checkpoint.storage", {"spec.checkpoint.storage": {}}),
        Bad("spec.checkpoint.storage", {"spec.checkpoint.storage": {"persistentVolumeClaim": "ckpt", "s3": _BUCKET}}),
    ],
    "CheckpointStorage.subPathOfClaim": [
        Bad("spec.checkpoint.storage.subPath", {"spec.checkpoint.storage": {"s3": _BUCKET, "subPath": "team"}}),
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
    "Model.gradientCheckpointingEveryNthLayer": [
        Bad(
            _T + "model.gradientCheckpointingEveryNthLayer",
            {_T + "model.gradientCheckpointing": "Never", _T + "model.gradientCheckpointingEveryNthLayer": 2},
        )
    ],
    "Training.warmupSteps": [
        Bad(_T + "optimizer.warmupSteps", {_T + "optimizer.warmupSteps": 11}),
        Bad(
            _T + "optimizer.warmupSteps",
            {_T + "algorithm.type": "PPO", _T + "critic.warmupSteps": 4, _T + "optimizer.warmupSteps": 7},
        ),
    ],
    "Training.trackers.type": [
        Bad(
            _T + "trackers",
            {_T + "trackers": [{"type": "WandB"}, {"type": "WandB", "wandb": {"project": "other"}}]},
            places=(_T + "trackers[0].type", _T + "trackers[1].type"),
        )
    ],
    "Tracker.blocks": [
        Bad(
            _T + "trackers[0]",
            {_T + "trackers": [{"type": "WandB", "mlflow": {}}]},
            places=(_T + "trackers[0].mlflow",),
        ),
        Bad(
            _T + "trackers[0]",
            {_T + "trackers": [{"type": "MLflow", "wandb": {}, "mlflow": {}}]},
            places=(_T + "trackers[0].wandb",),
        ),
    ],
    "Training.profileSteps": [
        Bad(
            _T + "profile.steps",
            {_T + "profile": {"steps": [1, 11, 10, 12]}},
            places=(_T + "profile.steps[1]", _T + "profile.steps[3]"),
        )
    ],
    "Training.evaluationsOnly": [Bad(_T + "steps", {_T + "steps": 0})],
    "Training.timelineSteps": [
        Bad(_T + "timelineSteps", {_T + "timelineSteps": [2, 11]}, places=(_T + "timelineSteps[1]",))
    ],
    "Rollout.cpuKvCache": [
        Bad(_T + "rollout.cpuKvCache", {_T + "rollout.cpuKvCache": memory})
        for memory in ("0", 0, "0Gi", "0.00Mi", "00k", "0m", "0e3", ".0", "+0.")
    ],
    "Lora.latentProjection": [
        Bad(_T + "model.lora.sync", {_T + "model.lora": {"sync": "Adapter", "targets": ["o_proj", name]}})
        for name in ("kv_b_proj", "self_attn.kv_b_proj")
    ],
    "Training.loraSync": [
        Bad(_T + "model.lora.sync", {_T + "model.lora": {"sync": "Adapter"}, _T + "rollout.engine": "HuggingFace"})
    ],
}
