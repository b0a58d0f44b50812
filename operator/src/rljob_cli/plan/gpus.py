"""`rljob plan`: which GPUs a job's pools are on: as options say it, the nodes of a cluster, the job or this machine.

Asking this machine and the cluster is here; what follows from their answers is `rljob_planner`'s.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from rljob_api.quantities import bytes_of
from rljob_api.scalars import Quantity
from rljob_api.v1alpha1.pools import Pool
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_cli.cluster.client import ClusterOptions, connect
from rljob_cli.devices import count_cores, gpu_names
from rljob_cli.errors import CliError, NotAllowedError
from rljob_cli.plan.options import GpuOptions
from rljob_planner.clusters import (
    DEFAULT_RESOURCE,
    SELECTORS,
    Label,
    cluster_of_nodes,
    cluster_of_pools,
    cluster_of_text,
    cluster_text,
    gpus_of_pools,
    selected_gpu,
)
from rljob_planner.errors import PlanError
from rljob_planner.gpus import CPU_NAME, KNOWN_GPUS, Cluster, Gpu, cpu_kind, gpu_named
from rljob_planner.job_memory import gpu_of_pool

_MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")
_LEAST_SPEED, _LARGEST_SPEED = 0.001, 1_000_000.0
"""Of a kind that is described: TFLOP/s, and GB/s."""


@dataclass(frozen=True)
class PoolGpus:
    """The kind of GPU of each pool, and all GPUs that there are for the job."""

    gpus: dict[str, Gpu]
    """Empty where the pools do not fit into the cluster, and need not."""
    cluster: Cluster
    origin: str
    """How they are known, for people."""
    labels: dict[str, Label] = field(default_factory=dict)
    """By a kind's name the label that selects its nodes, where the cluster was asked and has several kinds."""


def pool_gpus(spec: RLJobSpec, options: GpuOptions, *, must_fit: bool = True) -> PoolGpus:
    """The GPUs of a job. Raises CliError or PlanError where they are not known, or too few for the pools that
    `must_fit`."""
    if options.cluster is not None and options.from_cluster is not None:
        raise CliError("--cluster: says the nodes, and --from-cluster asks for them; give one of the two")
    named = partial(_kind, options=options, spec=spec)
    everywhere, of_pools = _asked(spec, options, named)
    if options.cluster is not None:
        if everywhere is not None:
            raise CliError("--gpu: --cluster says the kinds already; leave it out, or give POOL=KIND")
        cluster = cluster_of_text(options.cluster, named=lambda name: named(name, "--cluster"))
        found = PoolGpus(_placed(spec, cluster, of_pools, must_fit=must_fit), cluster, options.cluster)
    elif options.from_cluster is not None:
        cluster, name, labels = _cluster_of(spec, options.from_cluster, everywhere)
        origin = f"nodes of {name}: {cluster_text(cluster)}"
        found = PoolGpus(_placed(spec, cluster, of_pools, must_fit=must_fit), cluster, origin, labels)
    else:
        found = _from_pools(spec, everywhere, of_pools, named)
    names = [group.gpu.name for group in found.cluster]
    if options.describes and all(name in {gpu.name for gpu in KNOWN_GPUS} for name in names):
        raise CliError(
            f"--gpu-memory, --gpu-tflops, --gpu-bandwidth: describe a kind that is not known, and all are (seen"
            f" {', '.join(names)}); leave them out, or give the kind another name, such as --gpu mine"
        )
    return found


def _placed(spec: RLJobSpec, cluster: Cluster, of_pools: dict[str, Gpu], *, must_fit: bool) -> dict[str, Gpu]:
    """A pool that chooses its nodes by their GPU goes to those."""
    selected = {pool.name: gpu_of_pool(pool, [group.gpu for group in cluster]) for pool in spec.pools}
    chosen = {name: kind for name, kind in selected.items() if kind is not None}
    try:
        return gpus_of_pools(spec.pools, cluster, chosen | of_pools)
    except PlanError:
        if must_fit:
            raise
        return {}


def _from_pools(
    spec: RLJobSpec, everywhere: Gpu | None, of_pools: dict[str, Gpu], named: Callable[[str, str], Gpu]
) -> PoolGpus:
    """Of options, else of the labels that a pool's nodes must have, else of this machine."""
    gpus, origins = {}, set()
    for pool in spec.pools:
        if (gpu := of_pools.get(pool.name, everywhere)) is not None:
            gpus[pool.name] = gpu
            origins.add("--gpu")
        elif (gpu := selected_gpu(pool, partial(_of_label, pool, named))) is not None:
            gpus[pool.name] = gpu
            is_selector = any(label in pool.template.node_selector for label in SELECTORS)
            origins.add("the pools' nodeSelector" if is_selector else "the pools' affinity")
        else:
            gpus[pool.name] = _gpu_here(pool.name, named)
            origins.add("this machine")
    cluster = cluster_of_pools(spec.pools, gpus)
    return PoolGpus(gpus, cluster, f"{cluster_text(cluster)}, by {' and '.join(sorted(origins))}")


def _of_label(pool: Pool, named: Callable[[str, str], Gpu], product: str) -> Gpu:
    return named(product, f"spec.pools {pool.name}: the label that its nodes must have")


def _asked(spec: RLJobSpec, options: GpuOptions, named: Callable[[str, str], Gpu]) -> tuple[Gpu | None, dict[str, Gpu]]:
    """The kind that is meant for all pools, and those for single ones."""
    everywhere: Gpu | None = None
    of_pools: dict[str, Gpu] = {}
    names = [pool.name for pool in spec.pools]
    for text in options.kinds:
        pool, is_of_pool, kind = text.partition("=")
        if not is_of_pool:
            everywhere = named(text, "--gpu")
        elif pool not in names:
            raise CliError(f"--gpu {text}: there is no pool {pool!r} in the job; name one of {', '.join(names)}")
        else:
            of_pools[pool] = named(kind, "--gpu")
    if not options.kinds and options.cluster is None and options.describes:
        everywhere = named("custom", "--gpu")
    return everywhere, of_pools


def _kind(name: str, where: str, *, options: GpuOptions, spec: RLJobSpec) -> Gpu:
    """Of the table, of the three options that describe one, or this machine's CPUs."""
    if name.strip().lower() == CPU_NAME:
        return this_machine(spec)
    try:
        return gpu_named(name, where)
    except PlanError:
        if not options.describes:
            raise
    if options.memory is None or options.tflops is None or options.bandwidth is None:
        raise CliError(
            "--gpu-memory, --gpu-tflops, --gpu-bandwidth: describe a GPU together; give all three, such as"
            " --gpu-memory 80Gi --gpu-tflops 989 --gpu-bandwidth 3350"
        )
    if not all(_LEAST_SPEED <= speed <= _LARGEST_SPEED for speed in (options.tflops, options.bandwidth)):
        raise CliError(
            f"--gpu-tflops, --gpu-bandwidth: must be at least {_LEAST_SPEED:g} and at most {_LARGEST_SPEED:,.0f}"
            f" (seen {options.tflops:g} and {options.bandwidth:g}); correct them"
        )
    return Gpu(name, _bytes(options.memory), options.tflops * 1e12, options.bandwidth * 1e9)


def _bytes(text: str) -> float:
    try:
        num_bytes = bytes_of(TypeAdapter(Quantity).validate_python(text))
    except ValidationError:
        num_bytes = 0
    if num_bytes < 2**20:
        raise CliError(f"--gpu-memory: must be an amount of memory (seen {text!r}); write such as 80Gi")
    return float(num_bytes)


def this_machine(spec: RLJobSpec) -> Gpu:
    """Workers on this machine's CPU cores, as many as the largest pool has on a node."""
    memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    try:
        limit = _MEMORY_LIMIT.read_text(encoding="utf-8").strip()
    except OSError:
        limit = "max"
    if limit.isdigit():
        memory = min(memory, float(limit))
    return cpu_kind(memory, count_cores() / max(pool.gpus_per_node for pool in spec.pools))


def _gpu_here(pool: str, named: Callable[[str, str], Gpu]) -> Gpu:
    """The first GPU of this machine."""
    names = gpu_names()
    if not names:
        raise CliError(
            f"spec.pools {pool}: the kind of its GPUs is not known, and this machine has none; name it with --gpu H100,"
            " say the nodes with --cluster 4x8xH100, ask the cluster with --from-cluster, or plan for this machine's"
            " CPUs with --gpu cpu"
        )
    return named(re.sub(r"\s+", "-", names[0].strip()), "nvidia-smi")


def _cluster_of(spec: RLJobSpec, options: ClusterOptions, asked: Gpu | None) -> tuple[Cluster, str, dict[str, Label]]:
    """The cluster that `options` name, as its nodes describe it, its name, and the labels of kinds where it has
    several."""
    cluster = connect(options)
    try:
        nodes = cluster.nodes()
    except NotAllowedError as error:
        raise NotAllowedError(
            f"{error}; --from-cluster lists nodes, which takes a ClusterRole that allows it; --cluster 4x8xH100 takes"
            " no right"
        ) from None
    resources = sorted({DEFAULT_RESOURCE, *(pool.gpu_resource for pool in spec.pools)})
    found, labels = cluster_of_nodes(nodes, resources, asked)
    return found, cluster.name, labels if len({group.gpu.name for group in found}) > 1 else {}
