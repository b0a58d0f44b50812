"""Passes of models in training: forward ones (log-probabilities, values, scores) and updates.

Operations are those that bench/rljob_bench/model_shape.py counts: two per multiplied parameter and token; in causal
attention four per element of a query head and token that is seen; of the output head only response tokens, and once
more in a backward pass whose logits are cut into tiles (trainer, engines/train/token_logprobs.py). A backward pass is
two forward ones, or one beside adapters, whose base has no gradients of its weights; what is computed again
(engines/train/sharded_model.py) is one more of those layers. docs/planning.md says what reached shares stand for.

Gathering goes on beside computing, so of each micro-batch the longer of the two counts. Workers have equal numbers of
rows and nearly equal numbers of tokens (controller/balanced_order.py); where each has few rows, the longest one sets
the pace.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from rljob_planner.constants import Constants
from rljob_planner.timing.communication import COMPUTE, HOST, MEMORY_BANDWIDTH, Cost, Site, exchange, longest
from rljob_planner.timing.lengths import Lengths
from rljob_planner.workload import MASTER_BYTES, Head, TrainLayout, TrainModel

ADAMW_BYTES = 28
"""Of each weight and update: parameter, gradient and both moments are read, all but the gradient written, in 32 bits
(trainer, engines/train/optimizer.py)."""
NORM_BYTES = 4
"""Gradients are read once more for their norm."""
MOMENT_BYTES = 8


@dataclass(frozen=True)
class Rows:
    """What a pass is over."""

    count: float
    """Of all workers."""
    prompt: float
    response: float
    """Mean tokens."""
    square: float
    """Mean of the squares of whole rows."""
    longest: float
    """The longest row that is expected among them."""
    shortest: float

    @property
    def tokens(self) -> float:
        """Of prompts and responses."""
        return self.count * (self.prompt + self.response)


def rows_of(count: float, prompt: float, lengths: Lengths) -> Rows:
    """So many responses with their prompts, all of which are as long."""
    mean = lengths.mean
    square = prompt * prompt + 2 * prompt * mean + lengths.mean_square
    edge = 0.5 / max(1.0, count)
    return Rows(count, prompt, mean, square, prompt + lengths.quantile(1 - edge), prompt + lengths.quantile(edge))


class Operations(NamedTuple):
    """Of a pass, by the share of a GPU's speed that they reach."""

    products: float
    attention: float


def forward_operations(model: TrainModel, rows: Rows) -> Operations:
    """Of one pass over the rows."""
    layers, head, attention = _forward(model, rows)
    return Operations(layers + head, attention)


def update_operations(model: TrainModel, rows: Rows, num_parts: int = 1) -> Operations:
    """Of forward and backward pass, with what is computed again. `num_parts`: micro-batches of all ranks together, by
    which the rows are divided."""
    layers, head, attention = _forward(model, rows)
    num_layers, nth = model.shape.num_layers, model.checkpoints_every_nth_layer
    again = math.ceil(num_layers / nth) / num_layers if model.checkpoints_activations else 0.0
    of_weights = 2 if model.lora else 3
    in_tiles = rows.count * rows.response / num_parts > model.whole_logits_tokens
    products = layers * (of_weights + again) + head * (of_weights + in_tiles)
    return Operations(products + 2 * model.num_adapters * rows.tokens, attention * (3 + again))


def _forward(model: TrainModel, rows: Rows) -> tuple[float, float, float]:
    """Operations of layers without attention, of the head, of attention."""
    shape = model.shape
    layers = 2 * (shape.layer_matmul_parameters + model.num_adapters) * rows.tokens
    head = 2 * shape.embedding_parameters * rows.count * rows.response if model.head is Head.TOKENS else 0.0
    # Pairs of a row's tokens of which one sees the other: half of the square, and with a window no more than that of
    # each token.
    pairs = in_window = rows.square / 2
    num_full, num_windows = shape.attention_layers
    row, window = rows.prompt + rows.response, shape.sliding_window or 0
    if row > window:
        in_window = min(pairs, row * window - window * window / 2)
    seen = num_full * pairs + num_windows * in_window
    return layers, head, 4 * shape.query_size * rows.count * seen


def imbalance(rows: Rows, num_ranks: int) -> float:
    """Tokens of the worker that has most, over the mean. It has the longest row, beside which it gets the shortest."""
    own = rows.count / num_ranks
    mean = rows.prompt + rows.response
    if own <= 0 or mean <= 0:
        return 1.0
    held = math.ceil(own)
    return max(1.0, (rows.longest + (held - 1) * rows.shortest) / (own * mean), held / own)


def num_micro_batches(rows: Rows, max_tokens: int, layout: TrainLayout) -> int:
    """Of each worker. Rows of like length are put together while they fit (engines/train/micro_batching.py): half a row
    of room is lost on average."""
    budget = max_tokens * layout.sequence_parallel
    own = math.ceil(rows.count / layout.num_data_ranks)
    mean = max(1.0, rows.prompt + rows.response)
    if own * mean * imbalance(rows, layout.num_data_ranks) <= budget:
        return 1
    return math.ceil(own / max(1.0, budget / mean - 0.5))


def pass_cost(
    model: TrainModel, rows: Rows, max_tokens: int, layout: TrainLayout, site: Site, constants: Constants
) -> Cost:
    """A pass without backward over all rows."""
    links = exchange(model, layout, site, constants)
    efficiency = constants.forward_efficiency_of(site.gpu.name, has_experts=model.shape.has_experts)
    count = num_micro_batches(rows, max_tokens, layout)
    computing, formula = _computing(forward_operations(model, rows), rows, layout, site, constants, efficiency)
    talking = count * links.per_pass
    others = {
        "heads for tokens": links.per_token * rows.tokens / layout.num_gpus,
        "host": _parameter_copies(model, layout, site),
        "fixed": count * constants.pass_seconds,
    }
    bound_by = longest((COMPUTE, computing), (site.link_name(layout.shard_size), talking), (HOST, others["host"]))
    return Cost(max(computing, talking) + sum(others.values()), bound_by, _formula(formula, count, talking, others))


def update_cost(
    model: TrainModel,
    rows: Rows,
    num_updates: int,
    max_tokens: int,
    layout: TrainLayout,
    site: Site,
    constants: Constants,
) -> Cost:
    """So many optimizer updates, each over `rows`."""
    links = exchange(model, layout, site, constants)
    efficiency = constants.training_efficiency_of(site.gpu.name, has_experts=model.shape.has_experts)
    count = num_micro_batches(rows, max_tokens, layout)
    operations = update_operations(model, rows, count * layout.num_gpus)
    computing, formula = _computing(operations, rows, layout, site, constants, efficiency)
    talking = count * (links.per_pass + links.per_backward)
    passes = 3 if model.checkpoints_activations else 2
    optimizer, copied = optimizer_seconds(model, layout, site, count)
    others = {
        "heads for tokens": passes * links.per_token * rows.tokens / layout.num_gpus,
        "once per update": links.per_update,
        "AdamW": optimizer,
        "host": copied,
        "fixed": count * constants.pass_seconds + constants.update_seconds,
    }
    bound_by = longest(
        (COMPUTE, computing),
        (site.link_name(layout.shard_size), talking),
        (MEMORY_BANDWIDTH, optimizer),
        (HOST, copied),
        (site.link_name(layout.num_gpus), links.per_update),
    )
    once = max(computing, talking) + sum(others.values())
    formula = _formula(formula, count, talking, others)
    formula = f"{num_updates} updates x ({formula})" if num_updates > 1 else formula
    brought = _parameter_copies(model, layout, site)
    return Cost(num_updates * once + brought, bound_by, formula + (f" + host {brought:.3g} s" if brought else ""))


def optimizer_seconds(
    model: TrainModel, layout: TrainLayout, site: Site, num_micro_batches: int
) -> tuple[float, float]:
    """Of one update: in the GPU's memory, and on the link to the host for what is offloaded (engines/train/offload.py:
    moments come and go; gradients go after each micro-batch but the last, and come back in the next one)."""
    own = (model.num_adapters or model.num_parameters) / layout.shard_size
    moved = 2 * MOMENT_BYTES * own if model.offload.optimizer else 0.0
    if model.offload.gradients:
        moved += 2 * MASTER_BYTES * own * (num_micro_batches - 1)
    host = 0.0 if site.gpu.is_cpu else moved / site.gpu.host_bandwidth
    return (ADAMW_BYTES + NORM_BYTES) * own / site.gpu.bandwidth, host


def _parameter_copies(model: TrainModel, layout: TrainLayout, site: Site) -> float:
    """Parameters that are offloaded and come for each call (engines/train/engine.py, workers/critic.py). A frozen
    model's come from what the host keeps, so one way counts; a critic's go back. An actor's come once in a step, which
    is in `weight_sync`."""
    if not model.offload.parameters or site.gpu.is_cpu or (model.is_trained and model.head is not Head.VALUE):
        return 0.0
    moved = 2 * MASTER_BYTES if model.is_trained else model.compute_bytes
    return moved * model.num_parameters / layout.shard_size / site.gpu.host_bandwidth


def _computing(
    operations: Operations, rows: Rows, layout: TrainLayout, site: Site, constants: Constants, share: float
) -> tuple[float, str]:
    """Seconds of the worker that has most, and how they come about. `share`: of the GPU's speed, reached in
    products."""
    of_attention, uneven = constants.attention_efficiency, imbalance(rows, layout.num_data_ranks)
    worked = operations.products / share + operations.attention / of_attention
    seconds = worked * uneven / (layout.num_gpus * site.gpu.flops)
    each = site.gpu.flops / 1e12
    peak = f"{layout.num_gpus} x {each:,.0f} TFLOP/s" if each >= 10 else f"{layout.num_gpus} x {each:.2g} TFLOP/s"
    return seconds, (
        f"({operations.products / 1e12:,.4g} TFLOP / {share:.2f}"
        f" + attention {operations.attention / 1e12:,.4g} / {of_attention:.2f}) / ({peak})"
        f" x {uneven:.2f} imbalance = {seconds:.3g} s"
    )


def _formula(computing: str, count: int, talking: float, others: dict[str, float]) -> str:
    """`talking`: gathers and reductions of so many micro-batches, which go on meanwhile."""
    terms = [f"{name} {seconds:.3g} s" for name, seconds in others.items() if seconds]
    return " + ".join([f"max({computing}, gathers of {count} micro-batches {talking:.3g} s)", *terms])
