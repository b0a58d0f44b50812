"""The environment of a job's pods: what the contract promises the trainer, then the job's own variables."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pydantic import JsonValue, TypeAdapter

from rljob_api.base import WireModel
from rljob_api.constants import (
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
    RAY_WORKER_NICENESS,
)
from rljob_api.errors import HandoverError
from rljob_api.handover import TrainerJob, dump_job
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_operator.manifests.objects import JobIdentity, Manifest

HOOK_MARGIN_SECONDS = 5
"""How much earlier than the kubelet kills a pod its stop hooks give up."""

SHADOWS: Mapping[str, str] = MappingProxyType(
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
"""Names that no job may set, but a Secret or ConfigMap may hold, which nobody looks into: `env` wins over
`envFrom`, so there they are set to what means the same as unset. Ray's hooks name functions, which it imports and calls
even where the name is empty (2.60), so they name some of the standard library that do nothing: with nothing, with the
runtime environment, with two values. An image's own value is lost with all this; where it may be needed (PATH,
PYTHONPATH, CUDA_VISIBLE_DEVICES, RLJOB_DEVICE) nothing can be set. Whatever else RLJob relies on is set by this module,
by KubeRay (RAY_AUTH_MODE, RAY_AUTH_TOKEN, RAY_ADDRESS, ...), with the submission, or by the trainer in each worker
process (RANK, ...). Of Ray's settings, each of which has a variable, this is not all: `docs/cluster.md` says so."""


def spec_document(job: JobIdentity, spec: RLJobSpec) -> str:
    """The value of `constants.ENV_SPEC`. Raises HandoverError where it is too large for an environment variable."""
    document = TrainerJob(name=job.name, namespace=job.namespace, uid=job.uid, spec=spec)
    # Kubernetes replaces $(NAME) and $$ in values; within JSON the escape means the same and is left alone.
    text = dump_job(document).replace("$", "\\u0024")
    if len(text.encode()) > MAX_SPEC_BYTES:
        raise HandoverError(
            f"job {job.name}: its spec is larger than {MAX_SPEC_BYTES} bytes once every '$' in it is escaped; use"
            " fewer of them, or move the text into a ConfigMap"
        )
    return text


def head_environment(job: JobIdentity, spec: RLJobSpec) -> list[JsonValue]:
    """Variables of the head pod's Ray container, which the trainer inherits. Raises as `spec_document`."""
    health_check = [_variable(name, value) for name, value in RAY_HEALTH_CHECK.items()]
    return [_variable(ENV_SPEC, spec_document(job, spec)), *health_check, *worker_environment(spec)]


def worker_environment(spec: RLJobSpec) -> list[JsonValue]:
    """Variables of every Ray container."""
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
        *_shadows(spec),
        *([_variable("PYTHONPATH", folder)] if folder else []),
        *(wire(variable) for variable in spec.env),
    ]


def driver_log_environment(spec: RLJobSpec) -> list[JsonValue]:
    """Variables of the container that prints the driver's log."""
    return [_variable(ENV_RUN_FOLDER, POD_RUN_FOLDER), _grace(spec)]


def code_folder(spec: RLJobSpec) -> str | None:
    """Where the job's own Python is in the pods; None where it brings none."""
    if spec.code is None:
        return None
    return spec.code.image_path or POD_CODE_FOLDER


def wire(value: WireModel) -> Manifest:
    """A value of the API whose wire form is also the Kubernetes form."""
    return TypeAdapter(Manifest).validate_python(value.to_full_wire())


def without_defaults(value: WireModel) -> Manifest:
    """The same without what is as if it were unset."""
    return TypeAdapter(Manifest).validate_python(value.to_wire_without_defaults())


def _grace(spec: RLJobSpec) -> Manifest:
    return _variable(ENV_GRACE_SECONDS, str(max(1, spec.run_policy.grace_period_seconds - HOOK_MARGIN_SECONDS)))


def _shadows(spec: RLJobSpec) -> list[JsonValue]:
    """Of `SHADOWS` what some source of the job's could bring."""
    prefixes = {source.prefix or "" for source in spec.env_from}
    return [
        _variable(name, value)
        for name, value in SHADOWS.items()
        if any(name.startswith(prefix) and name != prefix for prefix in prefixes)
    ]


def _field(name: str, path: str) -> Manifest:
    """A variable with what the pod itself says, once it has a node."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _variable(name: str, value: str) -> Manifest:
    return {"name": name, "value": value}
