"""What the programs of a job find in all of its pods: variables, volumes, and the user's code."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated

from pydantic import Field, StrictStr

from rljob_api.base import WireModel
from rljob_api.rule import cel_text, exactly_one_rule, rule, starts_with_none_cel, sub_path_rule, union_rules
from rljob_api.scalars import AbsolutePath, DnsLabel, DnsName, EnvName, FileKey, Flag, LongText, Quantity

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


class KeyReference(WireModel):
    """One key of a Secret or ConfigMap in the job's namespace."""

    name: DnsName
    key: FileKey
    optional: Flag = False


class EnvSource(WireModel):
    """Where a variable's value comes from; exactly one."""

    secret_key_ref: KeyReference | None = None
    config_map_key_ref: KeyReference | None = None


class EnvVar(WireModel):
    """An environment variable of all pods of the job."""

    name: EnvName
    value: Annotated[StrictStr, Field(max_length=4096)] | None = None
    """`$(NAME)` is replaced by the value of an earlier entry; `$$` is `$`. `rljob run` does the same, with what is
    exported in place of Secrets and ConfigMaps."""
    value_from: EnvSource | None = None


class ObjectReference(WireModel):
    """A Secret or ConfigMap in the job's namespace."""

    name: DnsName
    optional: Flag = False


class EnvFrom(WireModel):
    """All keys of a Secret or ConfigMap as environment variables; exactly one of the two."""

    prefix: EnvName | None = None
    secret_ref: ObjectReference | None = None
    config_map_ref: ObjectReference | None = None


class LocalObjectReference(WireModel):
    """A ConfigMap or Secret in the job's namespace, by its name."""

    name: DnsName


class VolumeType(StrEnum):
    """One of the blocks below, of the same name, says the rest."""

    PERSISTENT_VOLUME_CLAIM = "PersistentVolumeClaim"
    CONFIG_MAP = "ConfigMap"
    SECRET = "Secret"
    EMPTY_DIR = "EmptyDir"


class ClaimVolume(WireModel):
    """A PersistentVolumeClaim in the job's namespace."""

    claim_name: DnsName


class EmptyDirVolume(WireModel):
    """Scratch space of one pod, lost with it."""

    size_limit: Quantity | None = None


class Volume(WireModel):
    """A volume and the place where all pods of the job see it."""

    name: DnsLabel
    mount_path: AbsolutePath
    read_only: Flag = False
    sub_path: LongText | None = None
    type: VolumeType
    persistent_volume_claim: ClaimVolume | None = None
    config_map: LocalObjectReference | None = None
    secret: LocalObjectReference | None = None
    empty_dir: EmptyDirVolume | None = None


class Code(WireModel):
    """The user's Python, put on PYTHONPATH of all pods; exactly one source. Locally it is the job file's folder."""

    config_map: DnsName | None = None
    """Each key is a file."""
    persistent_volume_claim: DnsName | None = None
    image_path: AbsolutePath | None = None
    """A folder that is already in the image."""


def is_secret_name(name: str) -> bool:
    """Whether a variable of this name holds a secret, so that its value must not stand in a job: `HF_TOKEN`."""
    return re.search(_SECRET_NAME, name) is not None and re.search(_NO_SECRET_NAME, name) is None


ENV_RULES = (
    rule(
        EnvVar,
        "EnvVar.nameNotOwned",
        field=".name",
        cel=f"{starts_with_none_cel('self.name', OWNED_ENV_PREFIXES)} && !(self.name in {list(OWNED_ENV_NAMES)})",
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
        cel=f"!has(self.prefix) || ({starts_with_none_cel('self.prefix', OWNED_ENV_PREFIXES)})",
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
    sub_path_rule(Volume, lambda volume: volume.sub_path),
)
