"""Time of the train engines' passes: forward passes (log-probabilities, values, scores) and updates.

How floating-point operations are counted:

- matrix products: 2 per weight and token; for the output head, only response tokens count
- causal attention: 4q per layer and per pair of a token and an earlier (or the same) token that it attends to
- backward pass: twice the forward pass; with adapters as much as the forward pass, because the base model's weights
  have no gradient
- gradient checkpointing: the forward pass of recomputed layers again (trainer, engines/train/sharded_model.py)
- tiled logits: the forward pass of the head again (trainer, engines/train/token_logprobs.py)

docs/architecture/planner-formulas.md explains which share of a GPU's speed is reached.

All-gathers run while the GPU computes, so the longer of the two times counts. Workers have equal numbers of rows and
nearly equal costs in every micro-batch (controller/balanced_order.py). If each worker has few rows, all wait for the
longest row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from rljob_planner.constants import Constants
from rljob_planner.timing.communication import (
    COMPUTE,
    HOST,
    MEMORY_BANDWIDTH,
    Cost,
    NodeType,
    communication_time,
    longest,
)
from rljob_planner.timing.lengths import Lengths
from rljob_planner.workload import MASTER_BYTES, Head, TrainLayout, TrainModel

ADAMW_BYTES = 28
"""Bytes that AdamW moves per parameter. In float32, it reads parameter, gradient and both moments, and writes parameter
and moments (trainer, engines/train/optimizer.py)."""
NORM_BYTES = 4
"""Bytes per parameter that are moved to compute the norm of the gradients, which are read once more for this."""
MOMENT_BYTES = 8
"""Bytes of the two moments of a parameter."""


@dataclass(frozen=True)
class Rows:
    """The rows (prompts with their responses) of a pass. Lengths are in tokens."""

    count: float
    """Rows of all workers."""
    prompt: float
    """Mean prompt length."""
    response: float
    """Mean response length."""
    square: float
    """Mean of the squared row lengths."""
    longest: float
    """Expected length of the longest row."""
    shortest: float
    """Expected length of the shortest row."""

    @property
    def tokens(self) -> float:
        """Tokens of all rows."""
        return self.count * (self.prompt + self.response)


def rows_of(count: float, prompt: float, lengths: Lengths) -> Rows:
    """`count` rows whose responses have these lengths. All prompts are assumed to have the mean length `prompt`."""
    mean = lengths.mean
    square = prompt * prompt + 2 * prompt * mean + lengths.mean_square
    edge = 0.5 / max(1.0, count)
    return Rows(count, prompt, mean, square, prompt + lengths.quantile(1 - edge), prompt + lengths.quantile(edge))


class Operations(NamedTuple):
    """Floating-point operations of a pass. The two kinds reach different shares of a GPU's speed."""

    products: float
    """Matrix products with weights."""
    attention: float
    """Products of queries, keys and values."""


def forward_operations(model: TrainModel, rows: Rows) -> Operations:
    """A forward pass over the rows."""
    layers, head, attention = _forward(model, rows)
    return Operations(layers + head, attention)


def update_operations(model: TrainModel, rows: Rows, num_parts: int = 1) -> Operations:
    """A forward and a backward pass over the rows, with recomputation. `num_parts`: the number of micro-batches, summed
    over all ranks, into which the rows are divided."""
    layers, head, attention = _forward(model, rows)
    num_layers, nth = model.shape.num_layers, model.checkpoints_every_nth_layer
    again = math.ceil(num_layers / nth) / num_layers if model.checkpoints_activations else 0.0
    of_weights = 2 if model.lora else 3
    in_tiles = rows.count * rows.response / num_parts > model.whole_logits_tokens
    products = layers * (of_weights + again) + head * (of_weights + in_tiles)
    return Operations(products + 2 * model.num_adapter_parameters * rows.tokens, attention * (3 + again))


def _forward(model: TrainModel, rows: Rows) -> tuple[float, float, float]:
    """Operations of a forward pass: of the layers without attention, of the head, and of attention."""
    shape = model.shape
    layers = 2 * (shape.layer_matmul_parameters + model.num_adapter_parameters) * rows.tokens
    head = 2 * shape.embedding_parameters * rows.count * rows.response if model.head is Head.TOKENS else 0.0
    # The pairs of tokens in a row of which one attends to the other are half of the square of the row's length. With a
    # sliding window, a token attends to at most as many tokens as the window has.
    pairs = in_window = rows.square / 2
    num_full, num_windows = shape.attention_layers
    row, window = rows.prompt + rows.response, shape.sliding_window or 0
    if row > window:
        in_window = min(pairs, row * window - window * window / 2)
    seen = num_full * pairs + num_windows * in_window
    return layers, head, 4 * shape.query_size * rows.count * seen


def imbalance(rows: Rows, num_ranks: int) -> float:
    """Tokens of the busiest worker, divided by the mean over all workers. It is assumed that the busiest worker has the
    longest row, and that its other rows are the shortest ones."""
    mean_rows = rows.count / num_ranks
    mean = rows.prompt + rows.response
    if mean_rows <= 0 or mean <= 0:
        return 1.0
    whole_rows = math.ceil(mean_rows)
    return max(1.0, (rows.longest + (whole_rows - 1) * rows.shortest) / (mean_rows * mean), whole_rows / mean_rows)


def num_micro_batches(rows: Rows, max_tokens: int, layout: TrainLayout) -> int:
    """The number of micro-batches per worker. `max_tokens`: maxTokensPerMicroBatch. On average, room for half a row
    stays empty, as if each worker packed its own rows (engines/train/micro_batching.py). Micro-batches that are planned
    for all workers are sometimes fewer."""
    budget = max_tokens * layout.sequence_parallel
    rows_per_rank = math.ceil(rows.count / layout.num_data_ranks)
    mean = max(1.0, rows.prompt + rows.response)
    if rows_per_rank * mean * imbalance(rows, layout.num_data_ranks) <= budget:
        return 1
    return math.ceil(rows_per_rank / max(1.0, budget / mean - 0.5))


def pass_cost(
    model: TrainModel, rows: Rows, max_tokens: int, layout: TrainLayout, node_type: NodeType, constants: Constants
) -> Cost:
    """The cost of a pass without backward over all rows. `max_tokens`: maxTokensPerMicroBatch."""
    links = communication_time(model, layout, node_type, constants)
    efficiency = constants.forward_efficiency_of(node_type.gpu.name, has_experts=model.shape.has_experts)
    count = num_micro_batches(rows, max_tokens, layout)
    computing, formula = _computing(forward_operations(model, rows), rows, layout, node_type, constants, efficiency)
    communicating = count * links.per_pass
    others = {
        "exchange of heads": links.per_token * rows.tokens / layout.num_gpus,
        "host": _parameter_copies(model, layout, node_type),
        "fixed": count * constants.pass_seconds,
    }
    bound_by = longest(
        (COMPUTE, computing), (node_type.link_name(layout.shard_size), communicating), (HOST, others["host"])
    )
    formula = _formula(formula, count, communicating, others)
    return Cost(max(computing, communicating) + sum(others.values()), bound_by, formula)


def update_cost(
    model: TrainModel,
    rows: Rows,
    num_updates: int,
    max_tokens: int,
    layout: TrainLayout,
    node_type: NodeType,
    constants: Constants,
) -> Cost:
    """The cost of `num_updates` updates, each with a forward and a backward pass over `rows`, and an optimizer step."""
    links = communication_time(model, layout, node_type, constants)
    efficiency = constants.training_efficiency_of(node_type.gpu.name, has_experts=model.shape.has_experts)
    count = num_micro_batches(rows, max_tokens, layout)
    operations = update_operations(model, rows, count * layout.num_gpus)
    computing, formula = _computing(operations, rows, layout, node_type, constants, efficiency)
    communicating = count * (links.per_pass + links.per_backward)
    passes = 3 if model.checkpoints_activations else 2
    optimizer, copied = optimizer_seconds(model, layout, node_type, count)
    others = {
        "exchange of heads": passes * links.per_token * rows.tokens / layout.num_gpus,
        "once per update": links.per_update,
        "AdamW": optimizer,
        "host": copied,
        "fixed": count * constants.pass_seconds + constants.update_seconds,
    }
    bound_by = longest(
        (COMPUTE, computing),
        (node_type.link_name(layout.shard_size), communicating),
        (MEMORY_BANDWIDTH, optimizer),
        (HOST, copied),
        (node_type.link_name(layout.num_gpus), links.per_update),
    )
    once = max(computing, communicating) + sum(others.values())
    formula = _formula(formula, count, communicating, others)
    formula = f"{num_updates} updates x ({formula})" if num_updates > 1 else formula
    loading = _parameter_copies(model, layout, node_type)
    return Cost(num_updates * once + loading, bound_by, formula + (f" + host {loading:.3g} s" if loading else ""))


def optimizer_seconds(
    model: TrainModel, layout: TrainLayout, node_type: NodeType, num_micro_batches: int
) -> tuple[float, float]:
    """Seconds of one update, without its passes: for the optimizer's access to the GPU's memory, and for copies of
    offloaded state on the link to the host. Offloaded moments are loaded and stored once. Offloaded gradients are
    stored after each micro-batch except the last, and loaded for the next one (engines/train/offload.py)."""
    elements = model.num_trained_parameters / layout.shard_size
    moved = 2 * MOMENT_BYTES * elements if model.offload.optimizer else 0.0
    if model.offload.gradients:
        moved += 2 * MASTER_BYTES * elements * (num_micro_batches - 1)
    host = 0.0 if node_type.gpu.is_cpu else moved / node_type.gpu.host_bandwidth
    return (ADAMW_BYTES + NORM_BYTES) * elements / node_type.gpu.bandwidth, host


def _parameter_copies(model: TrainModel, layout: TrainLayout, node_type: NodeType) -> float:
    """Seconds to copy offloaded parameters for a call (engines/train/engine.py, workers/critic.py). Those of a frozen
    model are only loaded, because the host keeps a copy. Those of a critic are loaded and stored. Those of the actor
    are loaded once per step; this is a part of `weight_sync`."""
    if not model.offload.parameters or node_type.gpu.is_cpu or (model.is_trained and model.head is not Head.VALUE):
        return 0.0
    moved = 2 * MASTER_BYTES if model.is_trained else model.compute_bytes
    return moved * model.num_parameters / layout.shard_size / node_type.gpu.host_bandwidth


def _computing(
    operations: Operations, rows: Rows, layout: TrainLayout, node_type: NodeType, constants: Constants, share: float
) -> tuple[float, str]:
    """Seconds in which the busiest worker computes, and the formula with its numbers. `share`: the share of the GPU's
    speed that matrix products reach."""
    of_attention, uneven = constants.attention_efficiency, imbalance(rows, layout.num_data_ranks)
    worked = operations.products / share + operations.attention / of_attention
    seconds = worked * uneven / (layout.num_gpus * node_type.gpu.flops)
    teraflops = node_type.gpu.flops / 1e12
    speed = f"{teraflops:,.0f}" if teraflops >= 10 else f"{teraflops:.2g}"
    peak = f"{layout.num_gpus} x {speed} TFLOP/s"
    return seconds, (
        f"({operations.products / 1e12:,.4g} TFLOP / {share:.2f}"
        f" + attention {operations.attention / 1e12:,.4g} / {of_attention:.2f}) / ({peak})"
        f" x {uneven:.2f} imbalance = {seconds:.3g} s"
    )


def _formula(computing: str, count: int, communicating: float, others: dict[str, float]) -> str:
    """The formula of a pass with its numbers. `communicating`: seconds of all-gathers and reductions, which overlap
    with computing."""
    terms = [f"{name} {seconds:.3g} s" for name, seconds in others.items() if seconds]
    return " + ".join([f"max({computing}, all-gathers of {count} micro-batches {communicating:.3g} s)", *terms])
