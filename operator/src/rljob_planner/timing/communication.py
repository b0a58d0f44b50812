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
from rljob_planner.placement import TrainLayout
from rljob_planner.timing.costs import Site
from rljob_planner.workload import TrainModel

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
