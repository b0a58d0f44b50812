"""Examples for the rules on variables, volumes and code of all pods; part of `rule_examples`."""

from __future__ import annotations

from collections.abc import Mapping

from rljob_testing.jobs.valid_job import Bad

_ENV = "spec.env"
_SECRET = {"name": "credentials", "key": "token"}
_CLAIM = {"name": "data", "mountPath": "/data", "type": "PersistentVolumeClaim"}
_CLAIMED = _CLAIM | {"persistentVolumeClaim": {"claimName": "data"}}
_SCRATCH = {"name": "scratch", "mountPath": "/scratch", "type": "EmptyDir", "emptyDir": {}}

GOOD: dict[str, list[Mapping[str, object]]] = {
    "RLJobSpec.env.name": [{_ENV: [{"name": "A", "value": "1"}, {"name": "B", "value": "1"}]}],
    "RLJobSpec.volumes.name": [{"spec.volumes": [_CLAIMED, _SCRATCH]}],
    "RLJobSpec.volumes.mountPath": [{"spec.volumes": [_CLAIMED, _SCRATCH]}],
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
}

BAD: dict[str, list[Bad]] = {
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
}
