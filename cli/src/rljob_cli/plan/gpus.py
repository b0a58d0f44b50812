"""Finds the GPU type of each pool of a job: from options, a cluster's nodes, the job itself, or this machine.

This module reads this machine and the cluster. `rljob_planner.clusters` interprets what was read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from rljob.cluster import ClusterOptions, connect
from rljob.errors import NotAllowedError
from rljob_api.quantities import bytes_of
from rljob_api.scalars import Quantity
from rljob_api.v1alpha1.pools import MIG, Pool
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_cli.devices import count_cores, gpu_names
from rljob_cli.errors import CliError
from rljob_cli.plan.options import GpuOptions
from rljob_planner.clusters import (
    DEFAULT_RESOURCE,
    SELECTORS,
    Label,
    allowed_gpus,
    cluster_of_nodes,
    cluster_of_pools,
    cluster_of_text,
    cluster_text,
    gpus_of_pools,
)
from rljob_planner.errors import PlanError
from rljob_planner.gpus import CPU_NAME, KNOWN_GPUS, Cluster, Gpu, cpu_worker, gpu_named
from rljob_planner.job_memory import known_gpus

_MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")
_LEAST_SPEED, _LARGEST_SPEED = 0.001, 1_000_000.0
"""Bounds of --gpu-tflops in TFLOP/s, and of --gpu-bandwidth in GB/s."""
FindGpu = Callable[[str, str], Gpu]
"""Finds a GPU type. Arguments: its name, and where the name is from, for messages, such as `--gpu`."""


@dataclass(frozen=True)
class PoolGpus:
    """The GPU type of each pool, and all GPUs that the job may use."""

    gpus: dict[str, Gpu]
    """The GPU type of each pool, by the pool's name. Empty if the cluster has no room for the pools; only --search
    allows this."""
    cluster: Cluster
    origin: str
    """The GPUs and the source of this fact, as printed: `4x8xH100`, `1x8xL4, from --gpu`."""
    labels: dict[str, Label] = field(default_factory=dict)
    """By GPU type: the label that selects its nodes. Empty, except for --from-cluster with several GPU types."""


def pool_gpus(spec: RLJobSpec, options: GpuOptions, *, must_fit: bool = True) -> PoolGpus:
    """The GPUs of a job's pools.

    Raises CliError or PlanError if the options cannot be combined, if a GPU type is unknown, and, with `must_fit`, if
    there are too few GPUs for the pools.
    """
    if options.cluster is not None and options.from_cluster is not None:
        raise CliError("--cluster: cannot be combined with --from-cluster, which reads the nodes; remove one of them")
    find_gpu = partial(_gpu_of_name, options=options, spec=spec)
    of_all_pools, of_pools = _gpus_of_option(spec, options, find_gpu)
    if options.cluster is not None:
        if of_all_pools is not None:
            raise CliError("--gpu: --cluster already has the GPU types; remove --gpu, or write POOL=TYPE for one pool")
        cluster = cluster_of_text(options.cluster, named=lambda name: find_gpu(name, "--cluster"))
        found = PoolGpus(_gpus_in_cluster(spec, cluster, of_pools, must_fit=must_fit), cluster, options.cluster)
    elif options.from_cluster is not None:
        cluster, name, labels = _read_cluster(spec, options.from_cluster, of_all_pools)
        origin = f"nodes of {name}: {cluster_text(cluster)}"
        found = PoolGpus(_gpus_in_cluster(spec, cluster, of_pools, must_fit=must_fit), cluster, origin, labels)
    else:
        found = _from_pools(spec, of_all_pools, of_pools, find_gpu)
    names = [group.gpu.name for group in found.cluster]
    if options.describe_a_gpu_type and all(name in {gpu.name for gpu in KNOWN_GPUS} for name in names):
        raise CliError(
            "--gpu-memory, --gpu-tflops, --gpu-bandwidth: describe a GPU type that rljob does not know, but it knows"
            f" all GPU types of this plan (seen {', '.join(names)}); remove these options, or choose another name, such"
            " as --gpu mine"
        )
    return _with_mig_devices(spec, found)


def _with_mig_devices(spec: RLJobSpec, found: PoolGpus) -> PoolGpus:
    """The same GPUs, marked as MIG devices where the pool's resource says so; a cluster if one of the pools' does."""
    pools = {pool.name for pool in spec.pools if MIG in pool.gpu_resource}
    if not pools:
        return found
    gpus = {name: replace(gpu, is_mig_device=name in pools) for name, gpu in found.gpus.items()}
    cluster = tuple(replace(group, gpu=replace(group.gpu, is_mig_device=True)) for group in found.cluster)
    return replace(found, gpus=gpus, cluster=cluster)


def _gpus_in_cluster(spec: RLJobSpec, cluster: Cluster, of_pools: dict[str, Gpu], *, must_fit: bool) -> dict[str, Gpu]:
    """The GPU type of each pool. A pool that selects nodes by their GPU type gets that type. Without `must_fit`, empty
    if the cluster has no room for the pools."""
    allowed = {pool.name: gpu_types for pool in spec.pools if (gpu_types := known_gpus(pool))}
    try:
        return gpus_of_pools(spec.pools, cluster, allowed | {name: [gpu] for name, gpu in of_pools.items()})
    except PlanError:
        if must_fit:
            raise
        return {}


def _from_pools(spec: RLJobSpec, of_all_pools: Gpu | None, of_pools: dict[str, Gpu], find_gpu: FindGpu) -> PoolGpus:
    """The GPU types from --gpu, else from the labels that a pool's nodes must have, else from this machine."""
    gpus, origins = {}, set()
    for pool in spec.pools:
        if (gpu := of_pools.get(pool.name, of_all_pools)) is not None:
            gpus[pool.name] = gpu
            origins.add("--gpu")
        elif allowed := allowed_gpus(pool, partial(_of_label, pool, find_gpu)):
            gpus[pool.name] = allowed[0]
            is_selector = any(label in pool.template.node_selector for label in SELECTORS)
            origins.add("the pools' nodeSelector" if is_selector else "the pools' affinity")
        else:
            gpus[pool.name] = _gpu_here(pool.name, find_gpu)
            origins.add("this machine")
    cluster = cluster_of_pools(spec.pools, gpus)
    return PoolGpus(gpus, cluster, f"{cluster_text(cluster)}, from {' and '.join(sorted(origins))}")


def _of_label(pool: Pool, find_gpu: FindGpu, product: str) -> Gpu:
    return find_gpu(product, f"spec.pools {pool.name}: the GPU label of its nodes")


def _gpus_of_option(spec: RLJobSpec, options: GpuOptions, find_gpu: FindGpu) -> tuple[Gpu | None, dict[str, Gpu]]:
    """The GPU type that --gpu sets for all pools (None if it sets none), and the types that it sets for single pools,
    by the pool's name."""
    of_all_pools: Gpu | None = None
    of_pools: dict[str, Gpu] = {}
    names = [pool.name for pool in spec.pools]
    for text in options.gpu_types:
        pool, is_of_pool, gpu_type = text.partition("=")
        is_repeated = pool in of_pools if is_of_pool else of_all_pools is not None
        if is_repeated:
            where = f"pool {pool}" if is_of_pool else "all pools"
            advice = "give one type" if is_of_pool else "give one type, or POOL=TYPE for each pool"
            raise CliError(
                f"--gpu: sets the type of {where} more than once (seen {', '.join(options.gpu_types)}); {advice}"
            )
        if not is_of_pool:
            of_all_pools = find_gpu(text, "--gpu")
        elif pool not in names:
            raise CliError(f"--gpu {text}: the job has no pool {pool!r}; use one of {', '.join(names)}")
        else:
            of_pools[pool] = find_gpu(gpu_type, "--gpu")
    if not options.gpu_types and options.cluster is None and options.describe_a_gpu_type:
        of_all_pools = find_gpu("custom", "--gpu")
    return of_all_pools, of_pools


def _gpu_of_name(name: str, where: str, *, options: GpuOptions, spec: RLJobSpec) -> Gpu:
    """The GPU type of this name: a known one, one that --gpu-memory, --gpu-tflops and --gpu-bandwidth describe, or
    `cpu` for this machine's CPUs. `where`: where the name is from, for messages, such as `--gpu`."""
    if name.strip().lower() == CPU_NAME:
        return this_machine(spec)
    try:
        return gpu_named(name, where)
    except PlanError:
        if not options.describe_a_gpu_type:
            raise
    if options.memory is None or options.tflops is None or options.bandwidth is None:
        raise CliError(
            "--gpu-memory, --gpu-tflops, --gpu-bandwidth: are only accepted together; give all three, such as"
            " --gpu-memory 80Gi --gpu-tflops 989 --gpu-bandwidth 3350"
        )
    if not all(_LEAST_SPEED <= speed <= _LARGEST_SPEED for speed in (options.tflops, options.bandwidth)):
        raise CliError(
            f"--gpu-tflops, --gpu-bandwidth: must be at least {_LEAST_SPEED:g} and at most {_LARGEST_SPEED:,.0f}"
            f" (seen {options.tflops:g} and {options.bandwidth:g}); correct them"
        )
    return Gpu(name, _memory_bytes(options.memory), options.tflops * 1e12, options.bandwidth * 1e9)


def _memory_bytes(text: str) -> float:
    """Parses the value of --gpu-memory."""
    try:
        num_bytes = bytes_of(TypeAdapter(Quantity).validate_python(text))
    except ValidationError:
        num_bytes = 0
    if num_bytes < 2**20:
        raise CliError(f"--gpu-memory: must be an amount of memory, at least 1Mi (seen {text!r}); write it like 80Gi")
    return float(num_bytes)


def this_machine(spec: RLJobSpec) -> Gpu:
    """A worker on this machine's CPUs, in the form of a GPU type. The workers share the memory, and the cores are
    divided evenly among them. The number of workers is the largest `gpusPerNode` of the pools."""
    memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    try:
        limit = _MEMORY_LIMIT.read_text(encoding="utf-8").strip()
    except OSError:
        limit = "max"
    if limit.isdigit():
        memory = min(memory, float(limit))
    return cpu_worker(memory, count_cores() / max(pool.gpus_per_node for pool in spec.pools))


def _gpu_here(pool: str, find_gpu: FindGpu) -> Gpu:
    """The type of this machine's first GPU. Raises CliError if this machine has none; the message names the pool."""
    names = gpu_names()
    if not names:
        raise CliError(
            f"spec.pools {pool}: the GPU type is unknown, and this machine has no GPU; set the type with --gpu H100 or"
            " the nodes with --cluster 4x8xH100, read the nodes with --from-cluster, or plan for this machine's CPUs"
            " with --gpu cpu"
        )
    return find_gpu(re.sub(r"\s+", "-", names[0].strip()), "nvidia-smi")


def _read_cluster(
    spec: RLJobSpec, options: ClusterOptions, default: Gpu | None
) -> tuple[Cluster, str, dict[str, Label]]:
    """The GPUs of the Kubernetes cluster, the cluster's name and, if it has several GPU types, the label of each.
    `default`: the GPU type of nodes whose labels name no type or an unknown one."""
    client = connect(options)
    try:
        nodes = client.nodes()
    except NotAllowedError as error:
        raise NotAllowedError(
            f"{error}; --from-cluster needs a ClusterRole with permission to list nodes; or name the nodes"
            " yourself, such as --cluster 4x8xH100, which needs no permission"
        ) from None
    resources = sorted({DEFAULT_RESOURCE, *(pool.gpu_resource for pool in spec.pools)})
    found, labels = cluster_of_nodes(nodes, resources, default)
    return found, client.name, labels if len({group.gpu.name for group in found}) > 1 else {}
