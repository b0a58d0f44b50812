"""Passes of models in training: forward ones (log-probabilities, values, scores) and updates.

Operations are those that bench/rljob_bench/model_shape.py counts: two per multiplied parameter and token; in causal
attention four per element of a query head and token that is seen, on average half of the row; of the output head only
response tokens (trainer, engines/train/token_logprobs.py). A backward pass is two forward ones; what is computed again
(engines/train/sharded_model.py) is one more of those layers. Beside adapters the base has no gradients of its weights,
which leaves one of the two. Logits that are cut into tiles are worked out again in the backward pass, which is one more
product of the head: 3 % of an update of Qwen3-4B whose tokens are all of responses, and 9 % of one of Qwen3-0.6B. Most
programs by whose runs the reached shares are known keep logits, so of theirs these operations are a little too many.

A reached share of a GPU's speed stands for all that is not a product (norms, activations, the optimizer's small
kernels); products of queries and keys have a share of their own. Gathering goes on beside computing, so of each
micro-batch the longer of the two counts. Workers have equal numbers of rows and nearly equal numbers of tokens
(controller/balanced_order.py); where each has few rows, the longest one sets the pace.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rljob_planner.constants import Constants
from rljob_planner.model_shape import ModelShape
from rljob_planner.timing.communication import (
    COMPUTE,
    HOST,
    MASTER_BYTES,
    MEMORY_BANDWIDTH,
    Cost,
    Site,
    exchange,
    longest,
)
from rljob_planner.timing.lengths import Lengths
from rljob_planner.workload import Head, TrainLayout, TrainModel

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


@dataclass(frozen=True)
class Operations:
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
    again = 0.0
    if model.checkpoints_activations:
        num_layers, nth = model.shape.num_layers, model.checkpoints_every_nth_layer
        again = math.ceil(num_layers / nth) / num_layers
    of_weights = 2 if model.lora else 3
    adapters = 2 * model.lora.num_parameters * rows.tokens if model.lora else 0.0
    in_tiles = rows.count * rows.response / num_parts > model.whole_logits_tokens
    return Operations(
        layers * (of_weights + again) + adapters + head * (of_weights + in_tiles),
        attention * (3 + again),
    )


def _forward(model: TrainModel, rows: Rows) -> tuple[float, float, float]:
    """Operations of layers without attention, of the head, of attention."""
    shape = model.shape
    weights = shape.layer_matmul_parameters + (model.lora.num_parameters if model.lora else 0)
    head = 2 * shape.embedding_parameters * rows.count * rows.response if model.head is Head.TOKENS else 0.0
    return 2 * weights * rows.tokens, head, 4 * shape.query_size * rows.count * _seen(shape, rows)


def _seen(shape: ModelShape, rows: Rows) -> float:
    """Pairs of a row's tokens of which one sees the other, over all layers: half of the square, and with a window no
    more than that of each token."""
    pairs = rows.square / 2
    full = shape.num_layers
    in_window = 0.0
    if shape.sliding_window is not None and shape.num_full_attention_layers is not None:
        full = shape.num_full_attention_layers
        row, window = rows.prompt + rows.response, shape.sliding_window
        in_window = min(pairs, row * window - window * window / 2 if row > window else pairs)
    return full * pairs + (shape.num_layers - full) * in_window


def imbalance(rows: Rows, num_ranks: int) -> float:
    """Tokens of the worker that has most, over the mean. It has the longest row, beside which it gets the shortest."""
    own = rows.count / num_ranks
    mean = rows.prompt + rows.response
    if own <= 0 or mean <= 0:
        return 1.0
    held = math.ceil(own)
    return max(1.0, (rows.longest + (held - 1) * rows.shortest) / (own * mean), held / own)


def num_micro_batches(rows: Rows, max_tokens: int, layout: TrainLayout) -> int:
    """Of each worker. Rows of like length are put together while they fit (engines/train/passes.py): half a row
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
    micro_batches = num_micro_batches(rows, max_tokens, layout)
    work = _Work.of(forward_operations(model, rows), rows, micro_batches, layout, site, constants, efficiency)
    talking = micro_batches * links.per_pass
    shared = links.per_token * rows.tokens / layout.num_gpus
    copied = _parameter_copies(model, layout, site)
    fixed = micro_batches * constants.pass_seconds
    seconds = max(work.seconds, talking) + shared + copied + fixed
    bound_by = longest((COMPUTE, work.seconds), (site.link_name(layout.shard_size), talking), (HOST, copied))
    return Cost(seconds, bound_by, work.formula(talking, {"heads for tokens": shared, "host": copied, "fixed": fixed}))


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
    micro_batches = num_micro_batches(rows, max_tokens, layout)
    operations = update_operations(model, rows, micro_batches * layout.num_gpus)
    work = _Work.of(operations, rows, micro_batches, layout, site, constants, efficiency)
    talking = work.count * (links.per_pass + links.per_backward)
    again = 1 if model.checkpoints_activations else 0
    shared = (2 + again) * links.per_token * rows.tokens / layout.num_gpus
    optimizer, copied = optimizer_seconds(model, layout, site, work.count)
    fixed = work.count * constants.pass_seconds + constants.update_seconds
    once = max(work.seconds, talking) + shared + links.per_update + optimizer + copied + fixed
    bound_by = longest(
        (COMPUTE, work.seconds),
        (site.link_name(layout.shard_size), talking),
        (MEMORY_BANDWIDTH, optimizer),
        (HOST, copied),
        (site.link_name(layout.num_gpus), links.per_update),
    )
    others = {"heads for tokens": shared, "once per update": links.per_update, "AdamW": optimizer, "host": copied}
    formula = work.formula(talking, {**others, "fixed": fixed})
    formula = f"{num_updates} updates x ({formula})" if num_updates > 1 else formula
    brought = _parameter_copies(model, layout, site)
    if brought:
        formula += f" + host {brought:.3g} s"
    return Cost(num_updates * once + brought, bound_by, formula)


def optimizer_seconds(
    model: TrainModel, layout: TrainLayout, site: Site, num_micro_batches: int
) -> tuple[float, float]:
    """Of one update: in the GPU's memory, and on the link to the host for what is offloaded (engines/train/offload.py:
    moments come and go; gradients go after each micro-batch but the last, and come back in the next one)."""
    own = (model.lora.num_parameters if model.lora else model.num_parameters) / layout.shard_size
    moved = 0.0
    if model.offload.optimizer:
        moved += 2 * MOMENT_BYTES * own
    if model.offload.gradients:
        moved += 2 * MASTER_BYTES * own * (num_micro_batches - 1)
    if site.gpu.is_cpu:
        moved = 0.0
    return (ADAMW_BYTES + NORM_BYTES) * own / site.gpu.bandwidth, moved / site.gpu.host_bandwidth


def _parameter_copies(model: TrainModel, layout: TrainLayout, site: Site) -> float:
    """Parameters that are offloaded and come for each call (engines/train/engine.py, workers/critic.py). A frozen
    model's come from what the host keeps, so one way counts; a critic's go back. An actor's come once in a step, which
    is in `weight_sync`."""
    if not model.offload.parameters or site.gpu.is_cpu or (model.is_trained and model.head is not Head.VALUE):
        return 0.0
    moved = 2 * MASTER_BYTES if model.is_trained else model.compute_bytes
    return moved * model.num_parameters / layout.shard_size / site.gpu.host_bandwidth


@dataclass(frozen=True)
class _Work:
    """Of one worker: its micro-batches, and what it computes in them."""

    count: int
    seconds: float
    computing: str
    """How the seconds come about."""

    @staticmethod
    def of(
        operations: Operations,
        rows: Rows,
        count: int,
        layout: TrainLayout,
        site: Site,
        constants: Constants,
        share: float,
    ) -> _Work:
        """`share`: of the GPU's speed, reached in products."""
        of_attention, speed = constants.attention_efficiency, layout.num_gpus * site.gpu.flops
        uneven = imbalance(rows, layout.num_data_ranks)
        seconds = (operations.products / share + operations.attention / of_attention) * uneven / speed
        each = site.gpu.flops / 1e12
        peak = f"{layout.num_gpus} x {each:,.0f} TFLOP/s" if each >= 10 else f"{layout.num_gpus} x {each:.2g} TFLOP/s"
        computing = (
            f"({operations.products / 1e12:,.4g} TFLOP / {share:.2f}"
            f" + attention {operations.attention / 1e12:,.4g} / {of_attention:.2f}) / ({peak})"
            f" x {uneven:.2f} imbalance = {seconds:.3g} s"
        )
        return _Work(count, seconds, computing)

    def formula(self, talking: float, others: dict[str, float]) -> str:
        """`talking`: gathers and reductions, which go on meanwhile."""
        terms = [f"max({self.computing}, gathers of {self.count} micro-batches {talking:.3g} s)"]
        terms += [f"{name} {seconds:.3g} s" for name, seconds in others.items() if seconds]
        return " + ".join(terms)
