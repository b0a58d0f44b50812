"""Rules on what a job says about its pods: pools, overlays, environment, volumes, code."""

from __future__ import annotations

import re
from collections.abc import Callable

from rljob_api.v1alpha1.checkpoint import CheckpointStorage
from rljob_api.v1alpha1.pools import (
    EnvFrom,
    EnvSource,
    EnvVar,
    PodOverlay,
    Pool,
    TaintEffect,
    Toleration,
    TolerationOperator,
    Volume,
)
from rljob_api.v1alpha1.rule import ContractT, Rule, cel_text, exactly_one_rule, rule, union_rules
from rljob_api.v1alpha1.spec import Code

OWNED_ENV_PREFIXES = ("RLJOB_", "RAY_", "KUBERAY_")
OWNED_ENV_NAMES = (
    "CUDA_VISIBLE_DEVICES",
    "LD_AUDIT",
    "LD_PRELOAD",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "PATH",
    "PYTHONHOME",
    "PYTHONPATH",
    "PYTHONSTARTUP",
    "RANK",
    "WORLD_SIZE",
)
OWNED_LABEL_PREFIXES = ("rljob.dev/", "ray.io/", "kueue.x-k8s.io/")
# KubeRay's service of the head pod selects by the first of these.
OWNED_LABELS = ("app.kubernetes.io/created-by", "app.kubernetes.io/managed-by")
OWNED_ANNOTATION_PREFIXES = ("rljob.dev/", "ray.io/")
OWNED_POOL_NAMES = ("head", "headgroup")
OWNED_VOLUME_PREFIX = "rljob-"
_OWNED_MOUNT = r"^/((tmp|(tmp/ray|dev|proc|rljob|sys)(/.*)?)/?)?$|//|/\.\.?(/|$)|:"
_SECRET_NAME = r"(?i)(TOKEN|KEY|SECRET|PASSWORD)$"
_NO_SECRET_NAME = (
    r"(?i)(^|_)((DONKEY|HOCKEY|HOTKEY|JOCKEY|MONKEY|TURKEY|WHISKEY)"
    r"|(ANSWER|FOREIGN|GROUP|INDEX|LOOKUP|PARTITION|PRIMARY|PROMPT|PUBLIC|SORT)_?KEY"
    r"|(BOS|CLS|EOS|MASK|PAD|SEP|STOP|UNK)_?TOKEN)$"
)
"""Names that `_SECRET_NAME` matches too, and that are no secrets: ordinary words, keys of data, and a tokenizer's
tokens. Any name that is not here is a secret."""
_OUTSIDE = r"^/|(^|/)\.\.(/|$)"


def is_secret_name(name: str) -> bool:
    """Whether a variable of this name holds a secret, so that its value must not stand in a job: `HF_TOKEN`."""
    return re.search(_SECRET_NAME, name) is not None and re.search(_NO_SECRET_NAME, name) is None


def _starts_with_none(subject: str, prefixes: tuple[str, ...]) -> str:
    return " && ".join(f"!{subject}.startsWith('{prefix}')" for prefix in prefixes)


def _sub_path_rule(on: type[ContractT], read: Callable[[ContractT], str | None]) -> Rule:
    return rule(
        on,
        f"{on.__name__}.subPath",
        field=".subPath",
        cel=f"!has(self.subPath) || !self.subPath.matches({cel_text(_OUTSIDE)})",
        wrong="must stay within the volume",
        advice="write a relative path without '..'",
        holds=lambda value: re.search(_OUTSIDE, read(value) or "") is None,
    )


POOL_RULES = (
    rule(
        Pool,
        "Pool.nameNotHead",
        field=".name",
        cel=f"!(self.name in {list(OWNED_POOL_NAMES)})",
        wrong="a pool cannot be called " + " or ".join(OWNED_POOL_NAMES),
        advice="these are names of the pod with the controller; choose another",
        holds=lambda pool: pool.name not in OWNED_POOL_NAMES,
    ),
    rule(
        Pool,
        "Pool.gpusNotInResources",
        field=".resources",
        cel="!(self.gpuResource in self.resources.requests) && !(self.gpuResource in self.resources.limits)",
        wrong="GPUs must not be written under resources",
        advice="use gpusPerNode and gpuResource",
        holds=lambda pool: pool.gpu_resource not in pool.resources.requests.keys() | pool.resources.limits.keys(),
    ),
    rule(
        PodOverlay,
        "PodOverlay.labels",
        field=".labels",
        cel=(
            f"!has(self.labels) || self.labels.all(k, {_starts_with_none('k', OWNED_LABEL_PREFIXES)}"
            f" && !(k in {list(OWNED_LABELS)}))"
        ),
        wrong=f"labels under {', '.join(OWNED_LABEL_PREFIXES)}, and {', '.join(OWNED_LABELS)} are owned by RLJob",
        advice="choose another prefix",
        holds=lambda overlay: (
            not any(key.startswith(OWNED_LABEL_PREFIXES) or key in OWNED_LABELS for key in overlay.labels)
        ),
    ),
    rule(
        PodOverlay,
        "PodOverlay.annotations",
        field=".annotations",
        cel=f"!has(self.annotations) || self.annotations.all(k, {_starts_with_none('k', OWNED_ANNOTATION_PREFIXES)})",
        wrong="annotations under " + ", ".join(OWNED_ANNOTATION_PREFIXES) + " are owned by RLJob",
        advice="choose another prefix",
        holds=lambda overlay: not any(key.startswith(OWNED_ANNOTATION_PREFIXES) for key in overlay.annotations),
    ),
    rule(
        Toleration,
        "Toleration.existsHasNoValue",
        field=".value",
        cel="self.operator != 'Exists' || !has(self.value) || self.value == ''",
        wrong="a toleration with operator Exists takes no value",
        advice="remove the value, or use operator Equal",
        holds=lambda toleration: toleration.operator is not TolerationOperator.EXISTS or not toleration.value,
    ),
    rule(
        Toleration,
        "Toleration.equalHasKey",
        field=".key",
        cel="self.operator != 'Equal' || has(self.key)",
        wrong="a toleration without a key needs operator Exists",
        advice="write the key of the taint, or operator Exists to tolerate all",
        holds=lambda toleration: toleration.operator is not TolerationOperator.EQUAL or toleration.key is not None,
    ),
    rule(
        Toleration,
        "Toleration.secondsOnlyForNoExecute",
        field=".tolerationSeconds",
        cel="!has(self.tolerationSeconds) || (has(self.effect) && self.effect == 'NoExecute')",
        wrong="tolerationSeconds needs effect NoExecute",
        advice="set the effect, or remove the seconds",
        holds=lambda t: t.toleration_seconds is None or t.effect is TaintEffect.NO_EXECUTE,
    ),
)

ENV_RULES = (
    rule(
        EnvVar,
        "EnvVar.nameNotOwned",
        field=".name",
        cel=f"{_starts_with_none('self.name', OWNED_ENV_PREFIXES)} && !(self.name in {list(OWNED_ENV_NAMES)})",
        wrong="this variable is set by RLJob itself",
        advice="remove it (put Python code under `code`, GPUs under `pools`)",
        holds=lambda env: not env.name.startswith(OWNED_ENV_PREFIXES) and env.name not in OWNED_ENV_NAMES,
    ),
    rule(
        EnvVar,
        "EnvVar.secretByReference",
        field=".value",
        cel=(
            f"!has(self.value) || !self.name.matches({cel_text(_SECRET_NAME)})"
            f" || self.name.matches({cel_text(_NO_SECRET_NAME)})"
        ),
        wrong="a variable whose name ends in TOKEN, KEY, SECRET or PASSWORD must not be written in the job",
        advice="put it into a Secret and name that under valueFrom.secretKeyRef (if it is none, rename it)",
        holds=lambda env: env.value is None or not is_secret_name(env.name),
        is_about_secret=True,
    ),
    exactly_one_rule(EnvVar, ("value", "value_from"), lambda env: (env.value, env.value_from)),
    exactly_one_rule(
        EnvSource,
        ("secret_key_ref", "config_map_key_ref"),
        lambda source: (source.secret_key_ref, source.config_map_key_ref),
    ),
    rule(
        EnvFrom,
        "EnvFrom.prefixNotOwned",
        field=".prefix",
        cel=f"!has(self.prefix) || ({_starts_with_none('self.prefix', OWNED_ENV_PREFIXES)})",
        wrong=f"variables under {', '.join(OWNED_ENV_PREFIXES)} are set by RLJob itself",
        advice="choose another prefix",
        holds=lambda source: source.prefix is None or not source.prefix.startswith(OWNED_ENV_PREFIXES),
    ),
    exactly_one_rule(
        EnvFrom, ("secret_ref", "config_map_ref"), lambda source: (source.secret_ref, source.config_map_ref)
    ),
    exactly_one_rule(
        Code,
        ("config_map", "persistent_volume_claim", "image_path"),
        lambda code: (code.config_map, code.persistent_volume_claim, code.image_path),
    ),
)

VOLUME_RULES = (
    *union_rules(
        Volume,
        (
            ("PersistentVolumeClaim", "persistent_volume_claim", lambda v: (v.type, v.persistent_volume_claim)),
            ("ConfigMap", "config_map", lambda v: (v.type, v.config_map)),
            ("Secret", "secret", lambda v: (v.type, v.secret)),
            ("EmptyDir", "empty_dir", lambda v: (v.type, v.empty_dir)),
        ),
    ),
    rule(
        Volume,
        "Volume.nameNotOwned",
        field=".name",
        cel=f"!self.name.startsWith('{OWNED_VOLUME_PREFIX}')",
        wrong=f"volumes under {OWNED_VOLUME_PREFIX} are owned by RLJob",
        advice="choose another name",
        holds=lambda volume: not volume.name.startswith(OWNED_VOLUME_PREFIX),
    ),
    rule(
        Volume,
        "Volume.mountPathNotOwned",
        field=".mountPath",
        cel=f"!self.mountPath.matches({cel_text(_OWNED_MOUNT)})",
        wrong="must be a plain path, and not /, /tmp, or one in /dev, /proc, /rljob, /sys or /tmp/ray",
        advice="mount it somewhere else, for example at /data",
        holds=lambda volume: re.search(_OWNED_MOUNT, volume.mount_path) is None,
    ),
    _sub_path_rule(Volume, lambda volume: volume.sub_path),
    _sub_path_rule(CheckpointStorage, lambda storage: storage.sub_path),
)
