"""Environment variables, volumes and user code of all pods of a job."""

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
"""Variables that RLJob, Ray, PyTorch or the device plugin set. A job must not set them."""
OWNED_VOLUME_PREFIX = "rljob-"
_RESERVED_MOUNT = r"^/((tmp|(tmp/ray|dev|proc|rljob|sys)(/.*)?)/?)?$|//|/\.\.?(/|$)|:"
_SECRET_NAME = r"(?i)(TOKEN|KEY|SECRET|PASSWORD)$"
_NO_SECRET_NAME = (
    r"(?i)(^|_)((DONKEY|HOCKEY|HOTKEY|JOCKEY|MONKEY|TURKEY|WHISKEY)"
    r"|(ANSWER|FOREIGN|GROUP|INDEX|LOOKUP|PARTITION|PRIMARY|PROMPT|PUBLIC|SORT)_?KEY"
    r"|(BOS|CLS|EOS|MASK|PAD|SEP|STOP|UNK)_?TOKEN)$"
)
"""Variables whose names match `_SECRET_NAME` although they hold no secret: ordinary words, keys of data, and tokens of
a tokenizer. All other variables whose names match hold a secret."""


class KeyReference(WireModel):
    """One key of a Secret or ConfigMap in the job's namespace."""

    name: DnsName
    """Name of the Secret or ConfigMap."""
    key: FileKey
    """Key in this object, for example `token`."""
    optional: Flag = False
    """If true, the variable is left unset when the object or the key does not exist."""


class EnvSource(WireModel):
    """Source of a variable's value; set exactly one of its fields."""

    secret_key_ref: KeyReference | None = None
    """A key of a Secret, for example `{name: hugging-face, key: token}`."""
    config_map_key_ref: KeyReference | None = None
    """A key of a ConfigMap."""


class EnvVar(WireModel):
    """An environment variable of all pods of the job: either `value` or `valueFrom`."""

    name: EnvName
    """Name of the variable, for example `HF_HOME`."""
    value: Annotated[StrictStr, Field(max_length=4096)] | None = None
    """Value of the variable. `$(NAME)` is replaced by the value of an earlier entry, `$$` by `$`.

    `rljob run` also replaces them. It takes values of Secrets and ConfigMaps from the environment in which it runs."""
    value_from: EnvSource | None = None


class ObjectReference(WireModel):
    """A Secret or ConfigMap in the job's namespace."""

    name: DnsName
    """Name of the Secret or ConfigMap."""
    optional: Flag = False
    """If true, the pods start even when the object does not exist."""


class EnvFrom(WireModel):
    """All keys of a Secret or ConfigMap as environment variables: either `secretRef` or `configMapRef`."""

    prefix: EnvName | None = None
    """Prefix of the variables' names, for example `DB_`; none when unset."""
    secret_ref: ObjectReference | None = None
    """The Secret whose keys become variables."""
    config_map_ref: ObjectReference | None = None
    """The ConfigMap whose keys become variables."""


class LocalObjectReference(WireModel):
    """A ConfigMap or Secret in the job's namespace."""

    name: DnsName
    """Name of the ConfigMap or Secret."""


class VolumeType(StrEnum):
    """Kind of volume. Its settings are in the block with the name of the kind, for example `emptyDir`."""

    PERSISTENT_VOLUME_CLAIM = "PersistentVolumeClaim"
    CONFIG_MAP = "ConfigMap"
    SECRET = "Secret"
    EMPTY_DIR = "EmptyDir"


class ClaimVolume(WireModel):
    """A PersistentVolumeClaim in the job's namespace."""

    claim_name: DnsName
    """Name of the claim."""


class EmptyDirVolume(WireModel):
    """Temporary storage of one pod, deleted with the pod."""

    size_limit: Quantity | None = None
    """Largest size in bytes, for example `50Gi`; unlimited when unset."""


class Volume(WireModel):
    """A volume that is mounted into all pods of the job."""

    name: DnsLabel
    """Name of the volume, for example `models`."""
    mount_path: AbsolutePath
    """Folder in the container where the volume is mounted, for example `/data`."""
    read_only: Flag = False
    """Mount the volume read-only."""
    sub_path: LongText | None = None
    """Relative path within the volume to mount; the whole volume when unset."""
    type: VolumeType
    persistent_volume_claim: ClaimVolume | None = None
    config_map: LocalObjectReference | None = None
    """A ConfigMap whose keys are files."""
    secret: LocalObjectReference | None = None
    """A Secret whose keys are files."""
    empty_dir: EmptyDirVolume | None = None


class Code(WireModel):
    """The user's Python modules, which are added to PYTHONPATH of all pods; set exactly one field. `rljob run` uses the
    folder of the job file instead."""

    config_map: DnsName | None = None
    """Name of a ConfigMap; each of its keys is a file."""
    persistent_volume_claim: DnsName | None = None
    """Name of a PersistentVolumeClaim with the modules in its root folder."""
    image_path: AbsolutePath | None = None
    """Folder in the trainer image, for example `/app`."""


def is_secret_name(name: str) -> bool:
    """Whether a variable of this name, such as `HF_TOKEN`, holds a secret. A job file must not contain its value."""
    return re.search(_SECRET_NAME, name) is not None and re.search(_NO_SECRET_NAME, name) is None


_WHERE_INSTEAD = {
    "PYTHONPATH": "Python modules belong under spec.code",
    "CUDA_VISIBLE_DEVICES": "GPUs belong under spec.pools",
}
"""Variables that a job must not set, and what to use instead."""

ENV_RULES = (
    rule(
        EnvVar,
        "EnvVar.nameNotOwned",
        field=".name",
        cel=f"{starts_with_none_cel('self.name', OWNED_ENV_PREFIXES)} && !(self.name in {list(OWNED_ENV_NAMES)})",
        wrong="this variable is reserved for the operator and Ray",
        advice="remove it",
        holds=lambda env: not env.name.startswith(OWNED_ENV_PREFIXES) and env.name not in OWNED_ENV_NAMES,
        details=lambda env, _: [text for name, text in _WHERE_INSTEAD.items() if env.name == name],
    ),
    rule(
        EnvVar,
        "EnvVar.secretByReference",
        field=".value",
        cel=(
            f"!has(self.value) || !self.name.matches({cel_text(_SECRET_NAME)})"
            f" || self.name.matches({cel_text(_NO_SECRET_NAME)})"
        ),
        wrong="a variable whose name ends in TOKEN, KEY, SECRET or PASSWORD must not have its value in the job",
        advice="store the value in a Secret and refer to it in valueFrom.secretKeyRef (if it is not a secret, rename"
        " the variable)",
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
        wrong=f"variables that start with {', '.join(OWNED_ENV_PREFIXES)} are reserved for the operator and Ray",
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
        wrong=f"volume names that start with {OWNED_VOLUME_PREFIX} are reserved for the operator",
        advice="choose another name",
        holds=lambda volume: not volume.name.startswith(OWNED_VOLUME_PREFIX),
    ),
    rule(
        Volume,
        "Volume.mountPathNotOwned",
        field=".mountPath",
        cel=f"!self.mountPath.matches({cel_text(_RESERVED_MOUNT)})",
        wrong=(
            "must not be /, /tmp or a path in /dev, /proc, /rljob, /sys or /tmp/ray, and must not contain '//', '.',"
            " '..' or ':'"
        ),
        advice="use another path, for example /data",
        holds=lambda volume: re.search(_RESERVED_MOUNT, volume.mount_path) is None,
    ),
    sub_path_rule(Volume, lambda volume: volume.sub_path),
)
