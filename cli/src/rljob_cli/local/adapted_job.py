"""Adapts a job that was written for a Kubernetes cluster to this machine, or to an existing Ray cluster. The functions
are pure: the devices are arguments.

On this machine each pool has one node. --workers sets the number of its workers; the default is the size of the pool
(nodes x gpusPerNode), at most the number of devices and MAX_WORKERS_PER_NODE. A job is rejected if its batches cannot
be divided evenly among these workers. On a Ray cluster the pools are unchanged. Fields that are used only on Kubernetes
are ignored, with a note for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import gcd

from rljob_api.rule import wire_name
from rljob_api.v1alpha1.job import RLJob
from rljob_api.v1alpha1.optional_roles import absent_roles
from rljob_api.v1alpha1.pools import Pool
from rljob_api.v1alpha1.rules import violations
from rljob_api.v1alpha1.run_policy import RunPolicy
from rljob_api.v1alpha1.spec import RLJobSpec, Roles, RolloutRole, TrainRole
from rljob_api.yaml_text import wire_path
from rljob_cli.devices import Devices, DeviceType
from rljob_cli.errors import LocalPlanError

MAX_WORKERS_PER_NODE = 64


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """The roles and workers of one pool. `rljob run` prints each pool as a row of a table."""

    pool: str
    """Name of the pool."""
    roles: tuple[str, ...]
    num_workers_in_file: int
    """The size of the pool in the file: nodes x gpusPerNode."""
    num_workers: int
    """Workers of the pool in this run."""


@dataclass(frozen=True, slots=True)
class LocalPlan:
    """The job in the form that runs on this machine or on a Ray cluster."""

    spec: RLJobSpec
    devices: Devices | None
    """The devices of this machine; None for a Ray cluster."""
    pools: tuple[PoolPlan, ...]
    notes: tuple[str, ...]
    """Fields of the file that are ignored or changed, one line each."""


def plan_for_machine(job: RLJob, devices: Devices, num_workers: int | None, *, uses_bucket: bool = False) -> LocalPlan:
    """The job adapted to this machine. `num_workers`: workers per pool; None for the size of the pool, at most the
    number of devices. `uses_bucket`: whether checkpoints are stored in the job's bucket.

    Raises:
        LocalPlanError: there are too few GPUs or too many workers, or the batches cannot be divided evenly among the
            workers, or the adapted job breaks another rule of the API.
    """
    roles_of = _roles_by_pool(job.spec)
    pools: list[Pool] = []
    rows: list[PoolPlan] = []
    for pool in job.spec.pools:
        in_file = pool.nodes * pool.gpus_per_node
        here = min(in_file, devices.count, MAX_WORKERS_PER_NODE) if num_workers is None else num_workers
        pools.append(pool.model_copy(update={"nodes": 1, "gpus_per_node": here}))
        rows.append(PoolPlan(pool.name, roles_of.get(pool.name, ()), in_file, here))
    _check_number_of_workers(rows, devices)
    spec = _with_storage(job.spec, uses_bucket).model_copy(update={"pools": tuple(pools)})
    spec, layout_notes = _with_fitting_layouts(spec, {row.pool: row.num_workers for row in rows})
    _check_rules(spec, rows, layout_notes)
    notes = (*layout_notes, *_notes_on_profiles(spec))
    return LocalPlan(spec, devices, tuple(rows), (*notes, *_notes_on_ignored_fields(job.spec, uses_bucket=uses_bucket)))


def plan_for_ray_cluster(job: RLJob, *, uses_bucket: bool = False) -> LocalPlan:
    """The job on a Ray cluster, with its pools unchanged. `uses_bucket`: as for `plan_for_machine`."""
    roles_of = _roles_by_pool(job.spec)
    sizes = [(pool.name, pool.nodes * pool.gpus_per_node) for pool in job.spec.pools]
    rows = tuple(PoolPlan(name, roles_of.get(name, ()), size, size) for name, size in sizes)
    notes = tuple(_notes_on_ignored_fields(job.spec, uses_bucket=uses_bucket))
    return LocalPlan(_with_storage(job.spec, uses_bucket), None, rows, notes)


def _with_storage(spec: RLJobSpec, uses_bucket: bool) -> RLJobSpec:
    """The job without `checkpoint.storage`, unless the bucket is used. The trainer then uses the run's folder.

    Raises:
        LocalPlanError: the bucket is to be used, but the job has none.
    """
    storage = spec.checkpoint.storage
    if uses_bucket:
        if storage is None or storage.s3 is None:
            raise LocalPlanError("--bucket: the job has no checkpoint.storage.s3; add it, or remove --bucket")
        return spec
    if storage is None or storage.s3 is None:
        return spec
    return spec.model_copy(update={"checkpoint": spec.checkpoint.model_copy(update={"storage": None})})


def _with_fitting_layouts(spec: RLJobSpec, num_workers: Mapping[str, int]) -> tuple[RLJobSpec, tuple[str, ...]]:
    """Reduces each shardSize, sequenceParallel and tensorParallel that does not divide the number of workers of the
    role's pool. This does not change what the model learns. Also returns a note about each change. `num_workers`: the
    number of workers by the name of the pool."""
    roles, pool_of = spec.roles, spec.placed_roles()
    settings_of_roles: dict[str, TrainRole | RolloutRole] = dict(roles)
    notes: list[str] = []
    for name, settings in settings_of_roles.items():
        role = wire_name(Roles, name)
        workers = num_workers[pool_of[role]]
        # Only integers: flags (True, False) fit any number of workers.
        in_file = {field: value for field, value in settings if type(value) is int and workers % value}
        fitting = {field: _fitting(field, value, workers) for field, value in in_file.items()}
        notes += (
            f"roles.{role}.{wire_name(type(settings), field)}: {value} instead of {in_file[field]}, because it must"
            f" divide the number of workers of the pool ({workers})"
            for field, value in fitting.items()
        )
        settings_of_roles[name] = settings.model_copy(update=fitting)
    return spec.model_copy(update={"roles": roles.model_copy(update=settings_of_roles)}), tuple(notes)


def _fitting(field: str, in_file: int, workers: int) -> int:
    """The value that replaces the one in the file, so that it divides the number of workers."""
    # A shard size above the number of workers becomes that number. Any smaller value would need more memory per worker,
    # because there would be several copies of the model.
    return workers if field == "shard_size" and in_file > workers else gcd(in_file, workers)


def _roles_by_pool(spec: RLJobSpec) -> dict[str, tuple[str, ...]]:
    """The roles that the job uses, by the name of their pool."""
    found: dict[str, tuple[str, ...]] = {}
    absent = absent_roles(spec)
    for role, pool in spec.placed_roles().items():
        if role not in absent:
            found[pool] = (*found.get(pool, ()), role)
    return found


def _check_number_of_workers(rows: list[PoolPlan], devices: Devices) -> None:
    """Raises LocalPlanError if there are more workers than GPUs, or more in a pool than a node may have. Workers on
    CPUs may share cores."""
    total = sum(row.num_workers for row in rows)
    if devices.type is DeviceType.CUDA and total > devices.count:
        num_per_pool = devices.count // len(rows)
        advice = [
            *([f"use --workers {num_per_pool} (the number per pool)"] if num_per_pool else []),
            *(["put the roles on one pool"] if len(rows) > 1 else []),
        ]
        raise LocalPlanError(
            f"spec.pools: {total} workers do not fit on this machine, which has {devices}, and each worker needs a GPU;"
            f" {', or '.join(advice)}"
        )
    for row in rows:
        if row.num_workers > MAX_WORKERS_PER_NODE:
            raise LocalPlanError(
                f"--workers: must be at most {MAX_WORKERS_PER_NODE} (seen {row.num_workers}); use a smaller number"
            )


def _check_rules(spec: RLJobSpec, rows: list[PoolPlan], notes: tuple[str, ...]) -> None:
    """Raises LocalPlanError if the adapted job breaks a rule of the API, for example because its batches cannot be
    divided evenly among the workers of this machine."""
    broken = violations(spec, ("spec",))
    if not broken:
        return
    numbers = ", ".join(f"{row.pool}: {row.num_workers_in_file} -> {row.num_workers}" for row in rows)
    lines = [*(f"{wire_path(found.path)}: {found.message}" for found in broken), *notes]
    text = "\n".join(f"  {line}" for line in lines)
    raise LocalPlanError(
        f"the job is not valid with the workers of this machine (workers per pool, file -> here: {numbers}):\n"
        f"{text}\nuse another number of --workers, or change the file"
    )


def _notes_on_profiles(spec: RLJobSpec) -> Iterator[str]:
    """A note if a worker that the adapted job does not have is to be profiled."""
    profile, pool = spec.training.profile, spec.placed_roles()["actor"]
    num_workers = sum(each.nodes * each.gpus_per_node for each in spec.pools if each.name == pool)
    missing = [str(rank) for rank in (() if profile is None else profile.ranks) if rank >= num_workers]
    if missing:
        yield f"training.profile.ranks: {', '.join(missing)} ignored, the actor's pool has {num_workers} workers here"


def _notes_on_ignored_fields(spec: RLJobSpec, *, uses_bucket: bool) -> Iterator[str]:
    """A note for each field of the job that is used only on Kubernetes."""
    if spec.image is not None:
        yield f"image {spec.image}: ignored, the trainer of this Python environment is used"
    if spec.ray_version is not None:
        yield f"rayVersion {spec.ray_version}: ignored, the Ray of this Python environment is used"
    if "head" in spec.model_fields_set:
        yield "head: ignored, the controller runs on this machine"
    for pool in spec.pools:
        unused = pool.model_fields_set & {"resources", "template", "shared_memory", "gpu_resource"}
        if unused:
            names = ", ".join(sorted(Pool.model_fields[name].alias or name for name in unused))
            yield f"pools {pool.name}: {names} ignored, there are no pods"
    for variable in spec.env:
        if variable.value_from is not None:
            yield f"env {variable.name}: its valueFrom is ignored; export {variable.name} yourself if the job needs it"
    yield from _notes_on_sources_and_storage(spec, uses_bucket)


def _notes_on_sources_and_storage(spec: RLJobSpec, uses_bucket: bool) -> Iterator[str]:
    for source in spec.env_from:
        reference = source.secret_ref or source.config_map_ref
        name = reference.name if reference is not None else "?"
        yield f"envFrom {name}: ignored, export the variables yourself if the job needs them"
    for secret in spec.image_pull_secrets:
        yield f"imagePullSecrets {secret.name}: ignored, no image is pulled"
    if spec.service_account_name is not None:
        yield f"serviceAccountName {spec.service_account_name}: ignored, there are no pods"
    for volume in spec.volumes:
        yield f"volumes {volume.name}: ignored, {volume.mount_path} of this machine is used"
    if spec.code is not None:
        yield "code: ignored, Python code is imported from the job file's folder and from --code"
    if (storage := spec.checkpoint.storage) is not None and storage.s3 is not None and not uses_bucket:
        yield (
            f"checkpoint.storage s3://{storage.s3.bucket}: not used, checkpoints are saved in the run's folder; with"
            " --bucket they are saved in the bucket"
        )
    elif storage is not None and storage.s3 is None:
        claim = storage.persistent_volume_claim
        yield f"checkpoint.storage {claim}: ignored, checkpoints are saved in the run's folder"
    # The trainer itself applies provisioningDeadlineSeconds, while it waits for its devices.
    unused = spec.run_policy.model_fields_set - {"provisioning_deadline_seconds"}
    if unused:
        names = ", ".join(sorted(RunPolicy.model_fields[name].alias or name for name in unused))
        yield f"runPolicy: {names} ignored, nothing stops or cleans up a local run; stop it with Ctrl-C"
