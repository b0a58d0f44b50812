"""What the GPUs of a model in training tell each other.

FSDP2 (trainer, engines/train/sharded_model.py): every layer is gathered before its forward and again before its
backward pass, in the dtype of the passes; its gradients are reduced and scattered in 32 bits, after each micro-batch
or, where the job defers it, after the last one. Replicas add up their shards once per update (engine.py,
set_requires_all_reduce). Ranks that share tokens exchange heads for tokens in every layer's attention
(sequence_parallel.py); nothing is computed meanwhile.

Legend: P parameters, W GPUs that hold a copy together, R copies, S ranks that share tokens; b bytes of a number.
"""

from __future__ import annotations

from dataclasses import dataclass

from rljob_planner.constants import Constants
from rljob_planner.gpus import Gpu
from rljob_planner.workload import EngineKind, RolloutLayout, RolloutWork, TrainLayout, TrainModel

COMPUTE = "compute"
MEMORY_BANDWIDTH = "memory bandwidth"
LINK = "the link between GPUs"
NETWORK = "the network"
HOST = "the link to the host"
FIXED = "launches and scheduling"
LONGEST_RESPONSE = "the longest response"


@dataclass(frozen=True)
class Cost:
    """Of one role and stage."""

    seconds: float
    bound_by: str
    """What most of it is waited for."""
    formula: str
    """With numbers put in."""


NO_COST = Cost(0.0, FIXED, "")


def longest(*parts: tuple[str, float]) -> str:
    """The name of what takes most seconds."""
    return max(parts, key=lambda part: part[1])[0]


@dataclass(frozen=True)
class Site:
    """GPUs of one kind on equal nodes."""

    gpu: Gpu
    gpus_per_node: int

    def spans_nodes(self, num_gpus: int) -> bool:
        """Whether so many neighbours are on more than one node."""
        return num_gpus > self.gpus_per_node

    def bandwidth(self, num_gpus: int, constants: Constants) -> float:
        """Bytes per second that each GPU receives when so many neighbours gather or reduce together. Across nodes every
        byte comes once into each node, by the network of all of its GPUs, and goes on over their link."""
        link = self.gpu.link_bandwidth * constants.link_efficiency
        if not self.spans_nodes(num_gpus):
            return link
        return min(link, self.gpus_per_node * self.gpu.network_bandwidth * constants.network_efficiency)

    def bandwidth_apart(self, num_gpus: int, distance: int, constants: Constants) -> float:
        """The same among every `distance`-th of so many GPUs: of a node fewer take part, or one."""
        link = self.gpu.link_bandwidth * constants.link_efficiency
        if not self.spans_nodes(num_gpus):
            return link
        in_a_node = max(1, self.gpus_per_node // distance)
        return min(link, in_a_node * self.gpu.network_bandwidth * constants.network_efficiency)

    def link_name(self, num_gpus: int) -> str:
        """For people."""
        return NETWORK if self.spans_nodes(num_gpus) else LINK


MASTER_BYTES = 4
"""Of a trained number."""
REDUCED_BYTES = 4
"""Of a gradient on its way (MixedPrecisionPolicy, reduce_dtype)."""


@dataclass(frozen=True)
class Exchange:
    """Seconds on the links of one GPU."""

    per_pass: float
    """Gathers of a forward pass."""
    per_backward: float
    """Gathers and reductions of a backward pass."""
    per_update: float
    """What comes once, after the last micro-batch."""
    per_token: float
    """Exchanges of heads for tokens, for each token of a GPU's own piece, forward; nothing is computed beside them."""


def exchange(model: TrainModel, layout: TrainLayout, site: Site, constants: Constants) -> Exchange:
    """Of a model on a layout."""
    shards, copies = layout.shard_size, layout.num_replicas
    bandwidth = site.bandwidth(shards, constants)
    whole = (shards - 1) / shards / bandwidth
    shape = model.shape
    adapters = model.lora.num_parameters if model.lora else 0
    gathered = model.compute_bytes * (model.num_parameters + adapters) * whole
    # The root stays whole between forward and backward pass.
    again = model.compute_bytes * (shape.layers_parameters + adapters) * whole
    learned = adapters or model.num_parameters
    reduced = REDUCED_BYTES * learned * whole
    over_copies = 0.0
    if copies > 1:
        over_copies = 2 * (copies - 1) / copies * REDUCED_BYTES * learned / shards
        over_copies /= site.bandwidth_apart(layout.num_gpus, shards, constants)
    parallel = layout.sequence_parallel
    per_token = 0.0
    if parallel > 1:
        kv_size = shape.kv_size * max(1.0, parallel / shape.num_kv_heads)
        numbers = shape.num_layers * (2 * shape.query_size + 2 * kv_size)
        share = (parallel - 1) / parallel
        per_token = model.compute_bytes * numbers * share / site.bandwidth(parallel, constants)
    deferred = model.defers_reduction
    return Exchange(
        per_pass=gathered,
        per_backward=again + (0.0 if deferred else reduced),
        per_update=over_copies + (reduced if deferred else 0.0),
        per_token=per_token,
    )


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
