"""The actor's weights on their way to the rollout engine, and what wakes and sleeps around it.

On one pool (trainer, weights/sync.py and weights/buckets.py): all ranks gather all tensors whole, bucket by bucket, and
the engine in each process takes its part; so each GPU receives the whole model over the slowest link of those that hold
a copy together, whatever the engine's tensor parallelism. vLLM loads tensor by tensor, by the hub's names, under which
each expert is three (models/weight_conversion.py). Adapters that go alone are all that is gathered, after the
first time. What is offloaded, or sleeps in the host's memory, goes over the link to the host (workers/hybrid.py,
engines/rollout/vllm_engine.py: level 1 keeps weights there, level 2 forgets them).

Apart from the actor the weights go over the network, as engines of other programs do it; this version of the trainer
cannot.
"""

from __future__ import annotations

from rljob_planner.constants import Constants
from rljob_planner.placement import RolloutLayout, TrainLayout
from rljob_planner.timing.costs import FIXED, HOST, MEMORY_BANDWIDTH, NETWORK, Cost, Site, longest
from rljob_planner.timing.passes import MASTER_BYTES
from rljob_planner.workload import EngineKind, RolloutWork, TrainModel

_COPY_BYTES_PER_NUMBER = 4
"""Of a copy within a GPU's memory in 16 bits: read and written."""
_NUM_COPIES = 2
"""Out of the gathered bucket, and into the engine."""


def sync_cost(
    actor: TrainModel,
    layout: TrainLayout,
    work: RolloutWork,
    rollout: RolloutLayout,
    actor_site: Site,
    rollout_site: Site,
    constants: Constants,
    *,
    is_shared: bool,
) -> Cost:
    """Of one step; `is_shared` where both are on the same GPUs. A job that syncs every n-th step pays an n-th."""
    whole = actor.lora.num_parameters if actor.lora and actor.lora.syncs_alone else actor.shape.num_parameters
    moved = work.weight_bytes * whole
    if not is_shared:
        bandwidth = min(
            constants.separate_sync_bandwidth,
            rollout_site.gpu.network_bandwidth * constants.network_efficiency,
        )
        seconds = moved / bandwidth / work.sync_every_steps
        formula = f"{moved / 1e9:.3g} GB / {bandwidth / 1e9:.3g} GB/s"
        return Cost(seconds + constants.wake_seconds, NETWORK, formula + _every(work))
    shards = layout.shard_size
    bandwidth = actor_site.bandwidth(shards, constants)
    gathering = moved * (shards - 1) / shards / bandwidth
    copying = whole * _COPY_BYTES_PER_NUMBER * _NUM_COPIES / actor_site.gpu.bandwidth
    host = 0.0 if actor_site.gpu.is_cpu else _host_bytes(actor, layout, work, rollout) / actor_site.gpu.host_bandwidth
    num_tensors = _num_tensors(actor, work)
    loading = num_tensors * constants.sync_tensor_seconds
    seconds = (gathering + copying + loading) / work.sync_every_steps + host + constants.wake_seconds
    formula = (
        f"{moved / 1e9:.3g} GB x {shards - 1}/{shards} / {bandwidth / 1e9:.3g} GB/s = {gathering:.3g} s + copies"
        f" {copying:.3g} s + {num_tensors:,} tensors {loading:.3g} s{_every(work)} + host {host:.3g} s"
        f" + fixed {constants.wake_seconds:.3g} s"
    )
    bound_by = longest(
        (actor_site.link_name(shards), gathering),
        (MEMORY_BANDWIDTH, copying),
        (HOST, host),
        (FIXED, loading + constants.wake_seconds),
    )
    return Cost(seconds, bound_by, formula)


def _num_tensors(actor: TrainModel, work: RolloutWork) -> int:
    """That the engine is given: by the hub's names, or for transformers' engine fused as in its modules."""
    if actor.lora and actor.lora.syncs_alone:
        return 2 * actor.lora.num_layers
    shape = actor.shape
    matrices = 3 if shape.has_mlp_gate else 2
    per_layer = 4 + shape.num_norms_per_layer + (2 if shape.has_qk_norm else 0)
    experts = matrices * shape.num_experts if work.engine is EngineKind.VLLM else 2
    of_experts = 1 + experts + (matrices if shape.shared_expert_size else 0)
    dense = shape.num_layers - shape.num_expert_layers
    return shape.num_layers * per_layer + dense * matrices + shape.num_expert_layers * of_experts + 3


def _host_bytes(actor: TrainModel, layout: TrainLayout, work: RolloutWork, rollout: RolloutLayout) -> float:
    """Over the link of one GPU in a step: the engine's weights there and back, where they sleep in the host's memory;
    the actor's shards there and back, where they are offloaded."""
    moved = 0.0
    if work.keeps_weights_asleep:
        moved += 2 * work.weight_bytes * work.shape.num_parameters / rollout.tensor_parallel
    if actor.offload.parameters:
        held = actor.compute_bytes if actor.lora else MASTER_BYTES
        moved += 2 * held * actor.num_parameters / layout.shard_size
    return moved


def _every(work: RolloutWork) -> str:
    return f", every {work.sync_every_steps} steps" if work.sync_every_steps > 1 else ""
