"""Communication between the GPUs of a model: FSDP2, sequence parallelism, and the weight sync.

Sources in the trainer's engines/train: FSDP2 (sharded_model.py) gathers each layer before its forward pass and again
before its backward pass, in the dtype of the passes. It reduces and scatters gradients in float32 after each
micro-batch or, with deferred reduction, after the last one. Replicas sum their shards once per update (engine.py,
set_requires_all_reduce). With sequence parallelism, ranks exchange heads for tokens in the attention of each layer
(sequence_parallel.py). They compute nothing during this exchange.
"""

from __future__ import annotations

from dataclasses import dataclass

from rljob_planner.constants import Constants
from rljob_planner.gpus import Gpu
from rljob_planner.model_shape import MLP_MATRICES
from rljob_planner.workload import MASTER_BYTES, RolloutLayout, RolloutWork, TrainLayout, TrainModel

COMPUTE = "compute"
MEMORY_BANDWIDTH = "memory bandwidth"
LINK = "the link between GPUs"
NETWORK = "the network"
HOST = "the link to the host"
LAUNCHES = "kernel launches and scheduling"
FIXED = "fixed overhead"
LONGEST_RESPONSE = "the longest response"


@dataclass(frozen=True)
class Cost:
    """The time of one phase of a step on one pool, with its formula."""

    seconds: float
    bound_by: str
    """The name of the part that takes most of the time: COMPUTE, NETWORK, ..."""
    formula: str
    """The formula with its numbers, for `--explain`."""


NO_COST = Cost(0.0, FIXED, "")


def longest(*parts: tuple[str, float]) -> str:
    """The name of the part with the most seconds."""
    return max(parts, key=lambda part: part[1])[0]


@dataclass(frozen=True)
class NodeType:
    """The GPU type and the size of a pool's nodes."""

    gpu: Gpu
    gpus_per_node: int

    def bandwidth(self, num_gpus: int, constants: Constants, distance: int = 1) -> float:
        """Bytes per second into each GPU in an all-gather or reduction. Of `num_gpus` GPUs, every `distance`-th takes
        part.

        Across nodes, each byte enters a node once, over the network cards of all its GPUs that take part. The links
        then pass it on to the other GPUs of the node.
        """
        link = self.gpu.link_bandwidth * constants.link_efficiency
        if num_gpus <= self.gpus_per_node:
            return link
        in_a_node = max(1, self.gpus_per_node // distance)
        return min(link, in_a_node * self.gpu.network_bandwidth * constants.network_efficiency)

    def link_name(self, num_gpus: int) -> str:
        """The name of the connection: NETWORK if these GPUs are on several nodes, else LINK."""
        return NETWORK if num_gpus > self.gpus_per_node else LINK


@dataclass(frozen=True)
class CommunicationTime:
    """Seconds that one GPU of a model in training spends on communication."""

    per_pass: float
    """All-gathers of a forward pass over one micro-batch."""
    per_backward: float
    """All-gathers and reduce-scatters of a backward pass over one micro-batch."""
    per_update: float
    """Reductions that run once per update, after its last micro-batch."""
    per_token: float
    """Exchange of heads for tokens (sequence parallelism) in a forward pass, per token in the GPU's part of the rows.
    The GPU computes nothing during it."""


def communication_time(
    model: TrainModel, layout: TrainLayout, node_type: NodeType, constants: Constants
) -> CommunicationTime:
    """The time of all communication of a model with this layout."""
    shape, shards, copies, parallel = model.shape, layout.shard_size, layout.num_replicas, layout.sequence_parallel
    whole = (shards - 1) / shards / node_type.bandwidth(shards, constants)
    trained = MASTER_BYTES * model.num_trained_parameters
    among_copies = node_type.bandwidth(layout.num_gpus, constants, shards)
    over_copies = 2 * (copies - 1) / copies * trained / shards / among_copies
    kv_size = shape.kv_size * max(1.0, parallel / shape.num_kv_heads)
    heads = model.compute_bytes * shape.num_layers * 2 * (shape.query_size + kv_size)
    reduced = trained * whole
    # Parameters outside the decoder layers are gathered once: root and head stay gathered from the forward to the
    # backward pass, and the backward pass of an embedding does not need its weight.
    again = model.compute_bytes * (shape.layers_parameters + model.num_adapter_parameters) * whole
    return CommunicationTime(
        per_pass=model.compute_bytes * (model.num_parameters + model.num_adapter_parameters) * whole,
        per_backward=again + (0.0 if model.defers_reduction else reduced),
        per_update=over_copies + (reduced if model.defers_reduction else 0.0),
        per_token=heads * (parallel - 1) / parallel / node_type.bandwidth(parallel, constants),
    )


_COPY_BYTES_PER_NUMBER = 4
"""Bytes that are moved when a 16-bit number is copied within a GPU's memory: one read and one write."""
_NUM_COPIES = 2
"""How often each weight is copied: out of the gathered bucket, and into the engine."""


def sync_cost(
    actor: TrainModel,
    layout: TrainLayout | None,
    work: RolloutWork,
    rollout: RolloutLayout,
    node_type: NodeType,
    constants: Constants,
) -> Cost:
    """The cost of weight syncs per step, on the rollout's GPUs. `layout`: the actor's layout; None if the actor is on
    other GPUs. If the job syncs every nth step, a step has 1/n of the cost of a sync; but the wake-up, and copies
    between GPU and host, are counted in every step."""
    syncs_alone = actor.lora is not None and actor.lora.syncs_alone
    whole = actor.num_adapter_parameters if syncs_alone else actor.shape.num_parameters
    moved = work.weight_bytes * whole
    nth, wake = work.sync_every_steps, constants.wake_seconds
    interval = f", every {nth} steps" if nth > 1 else ""
    if layout is None:
        network = node_type.gpu.network_bandwidth * constants.network_efficiency
        bandwidth = min(constants.separate_sync_bandwidth, network)
        formula = f"{moved / 1e9:.3g} GB / {bandwidth / 1e9:.3g} GB/s{interval}"
        return Cost(moved / bandwidth / nth + wake, NETWORK, formula)
    shards, gpu = layout.shard_size, node_type.gpu
    bandwidth = node_type.bandwidth(shards, constants)
    gathering = moved * (shards - 1) / shards / bandwidth
    copying = whole * _COPY_BYTES_PER_NUMBER * _NUM_COPIES / gpu.bandwidth
    host = 0.0 if gpu.is_cpu else _host_bytes(actor, layout, work, rollout) / gpu.host_bandwidth
    num_tensors = _num_tensors(actor, work)
    loading = num_tensors * constants.sync_tensor_seconds
    formula = (
        f"{moved / 1e9:.3g} GB x {shards - 1}/{shards} / {bandwidth / 1e9:.3g} GB/s = {gathering:.3g} s + copies"
        f" {copying:.3g} s + {num_tensors:,} tensors {loading:.3g} s{interval} + host {host:.3g} s + fixed {wake:.3g} s"
    )
    link = node_type.link_name(shards)
    bound_by = longest((link, gathering), (MEMORY_BANDWIDTH, copying), (HOST, host), (FIXED, loading + wake))
    return Cost((gathering + copying + loading) / nth + host + wake, bound_by, formula)


def _num_tensors(actor: TrainModel, work: RolloutWork) -> int:
    """The number of tensors that the engine loads in a weight sync. Of most models with experts, vLLM gets each
    expert's matrices as separate tensors, as they are on the hub; of some models it gets those of a layer in two
    tensors, as transformers does."""
    if actor.lora and actor.lora.syncs_alone:
        return 2 * actor.lora.num_linear_layers
    shape, matrices, sparse = actor.shape, MLP_MATRICES, actor.shape.num_expert_layers
    per_layer = 4 + shape.num_norms_per_layer + (2 if shape.has_qk_norm else 0)
    experts = matrices * shape.num_experts if work.is_vllm and not shape.has_whole_experts else 2
    of_experts = 1 + experts + (matrices if shape.shared_expert_size else 0)
    return shape.num_layers * per_layer + (shape.num_layers - sparse) * matrices + sparse * of_experts + 3


def _host_bytes(actor: TrainModel, layout: TrainLayout, work: RolloutWork, rollout: RolloutLayout) -> float:
    """Bytes over one GPU's link to the host in a step, in both directions: the engine's weights if host memory holds
    them during sleep, and the actor's shards if they are offloaded."""
    moved = 0.0
    if work.keeps_weights_on_host:
        moved += 2 * work.weight_bytes * work.shape.num_parameters / rollout.tensor_parallel
    if actor.offload.parameters:
        held = actor.compute_bytes if actor.lora else MASTER_BYTES
        moved += 2 * held * actor.num_parameters / layout.shard_size
    return moved
