"""Environment variables of a job's pods: those that the trainer needs, then those of the job's `env`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pydantic import JsonValue, TypeAdapter

from rljob_api.base import WireModel
from rljob_api.constants import (
    BUCKET_CREDENTIALS,
    ENV_CACHE,
    ENV_CHECKPOINT_FOLDER,
    ENV_GRACE_SECONDS,
    ENV_JOB_FOLDER,
    ENV_NODE_NAME,
    ENV_POD_NAME,
    ENV_RUN_FOLDER,
    ENV_SPEC,
    MAX_SPEC_BYTES,
    POD_CACHE_FOLDER,
    POD_CHECKPOINT_FOLDER,
    POD_CODE_FOLDER,
    POD_RUN_FOLDER,
    POD_STORAGE_FOLDER,
    RAY_HEALTH_CHECK,
    RAY_USAGE_REPORTS,
    RAY_WORKER_NICENESS,
)
from rljob_api.contract_documents import TrainerJob, dump_job
from rljob_api.errors import DocumentError
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_operator.manifests.ownership import JobIdentity, Manifest

HOOK_MARGIN_SECONDS = 5
"""The stop hook of a pod stops waiting for the trainer this long before the kubelet kills the pod."""

FORBIDDEN_VARIABLES: Mapping[str, str] = MappingProxyType(
    {
        "LD_AUDIT": "",
        "LD_PRELOAD": "",
        "PYTHONHOME": "",
        "PYTHONSTARTUP": "",
        "RAY_CLUSTER_ACTIVITY_HOOK": "builtins.dict",
        "RAY_ENABLE_K8S_TOKEN_AUTH": "false",
        "RAY_RUNTIME_ENV_HOOK": "copy.copy",
        "RAY_RUNTIME_ENV_PLUGINS": "",
        "RAY_START_HOOK": "operator.is_",
    }
)
"""Variables that no job may set, with values that have the same effect as if the variable were unset.

A Secret or ConfigMap of `envFrom` could contain such a variable. The operator does not read Secrets and ConfigMaps, so
it sets the variables in `env`, which takes precedence over `envFrom` and over the image. Ray 2.60 imports and calls the
function that a hook variable names, even if the value is empty. So the values name functions of the standard library
that do nothing here: Ray calls `builtins.dict` without arguments, `copy.copy` with a runtime environment, and
`operator.is_` with two values.

Variables that an image may need (PATH, PYTHONPATH, CUDA_VISIBLE_DEVICES, RLJOB_DEVICE) are not in this list. Other
variables on which RLJob relies are set by this module, by KubeRay (RAY_AUTH_MODE, RAY_AUTH_TOKEN, RAY_ADDRESS, ...),
with the submission, or by the trainer in each worker process (RANK, ...). Every Ray setting has a variable, and this
list does not cover all of them; `docs/cluster.md` says so."""


def spec_document(job: JobIdentity, spec: RLJobSpec) -> str:
    """The value of the variable `constants.ENV_SPEC`. Raises DocumentError if it has more than `MAX_SPEC_BYTES`."""
    document = TrainerJob(name=job.name, namespace=job.namespace, uid=job.uid, spec=spec)
    # Kubernetes expands $(NAME) and $$ in values. The JSON escape means the same and is not expanded.
    text = dump_job(document).replace("$", "\\u0024")
    if len(text.encode()) > MAX_SPEC_BYTES:
        raise DocumentError(
            f"job {job.name}: the spec is larger than {MAX_SPEC_BYTES} bytes after every '$' in it is escaped; use"
            " fewer '$', or move the text into a ConfigMap"
        )
    return text


def head_environment(job: JobIdentity, spec: RLJobSpec) -> list[JsonValue]:
    """Variables of the head pod's Ray container, which the trainer inherits. Raises DocumentError."""
    ray = [_variable(name, value) for name, value in (*RAY_HEALTH_CHECK.items(), RAY_USAGE_REPORTS)]
    return [_variable(ENV_SPEC, spec_document(job, spec)), *ray, *worker_environment(spec)]


def worker_environment(spec: RLJobSpec) -> list[JsonValue]:
    """Variables of every Ray container, in worker pods and in the head pod."""
    folder = code_folder(spec)
    return [
        _variable(ENV_RUN_FOLDER, POD_RUN_FOLDER),
        _variable(ENV_CHECKPOINT_FOLDER, POD_CHECKPOINT_FOLDER),
        _variable(ENV_JOB_FOLDER, folder or POD_STORAGE_FOLDER),
        _variable(ENV_CACHE, POD_CACHE_FOLDER),
        _field(ENV_POD_NAME, "metadata.name"),
        _field(ENV_NODE_NAME, "spec.nodeName"),
        _variable(*RAY_WORKER_NICENESS),
        _grace(spec),
        *_neutral_variables(spec),
        *_bucket_credentials(spec),
        *([_variable("PYTHONPATH", folder)] if folder else []),
        *(wire(variable) for variable in spec.env),
    ]


def driver_log_environment(spec: RLJobSpec) -> list[JsonValue]:
    """Variables of the container that prints the driver's log."""
    return [_variable(ENV_RUN_FOLDER, POD_RUN_FOLDER), _grace(spec)]


def code_folder(spec: RLJobSpec) -> str | None:
    """Folder of the job's own Python code in the pods; None if the job has no `code`."""
    if spec.code is None:
        return None
    return spec.code.image_path or POD_CODE_FOLDER


def wire(value: WireModel) -> Manifest:
    """A part of a spec as the part of a Kubernetes object with the same fields: with defaults, without fields that are
    None."""
    return TypeAdapter(Manifest).validate_python(value.to_full_wire())


def without_defaults(value: WireModel) -> Manifest:
    """Like `wire`, but without the fields whose value is their default."""
    return TypeAdapter(Manifest).validate_python(value.to_wire_without_defaults())


def _grace(spec: RLJobSpec) -> Manifest:
    """The variable with the seconds that a stop hook waits for the trainer."""
    return _variable(ENV_GRACE_SECONDS, str(max(1, spec.run_policy.grace_period_seconds - HOOK_MARGIN_SECONDS)))


def _neutral_variables(spec: RLJobSpec) -> list[JsonValue]:
    """The variables of `FORBIDDEN_VARIABLES` that a Secret or ConfigMap of `envFrom` could set, with the values there.
    A source with a prefix can set only variables that begin with the prefix."""
    prefixes = {source.prefix or "" for source in spec.env_from}
    return [
        _variable(name, value)
        for name, value in FORBIDDEN_VARIABLES.items()
        if any(name.startswith(prefix) and name != prefix for prefix in prefixes)
    ]


def _bucket_credentials(spec: RLJobSpec) -> list[JsonValue]:
    """The variables with the credentials of the bucket, by reference: the operator does not read the Secret. Variables
    of the job's `env` take precedence."""
    storage = spec.checkpoint.storage
    if storage is None or storage.s3 is None or storage.s3.secret is None:
        return []
    in_env = {variable.name for variable in spec.env}
    variables: list[JsonValue] = []
    for name, is_optional in BUCKET_CREDENTIALS.items():
        if name not in in_env:
            key: Manifest = {"name": storage.s3.secret, "key": name, "optional": is_optional}
            variables.append({"name": name, "valueFrom": {"secretKeyRef": key}})
    return variables


def _field(name: str, path: str) -> Manifest:
    """A variable whose value is a field of the pod, such as its name or node."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _variable(name: str, value: str) -> Manifest:
    return {"name": name, "value": value}
