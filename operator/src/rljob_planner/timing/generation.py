"""Generation: how fast one engine decodes, and how long all engines take for a step's responses.

A step of decoding reads all weights and the whole cache, or waits for its products, whichever takes longer (a
roofline); exchanges between the GPUs of an engine and the host's part come on top. The prompts' own pass is bound by
products and made once per prompt where the engine keeps prefixes (vLLM), else for every response. How many sequences
are under way at once is limited by the job and by the cache (`kv_cache`).

Responses are dealt out to engines in equal numbers; all wait for the one that has the longest response.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from rljob_planner.constants import Constants
from rljob_planner.kv_cache import kv_bytes_per_layer_token
from rljob_planner.model_shape import MLP_MATRICES
from rljob_planner.timing.communication import COMPUTE, FIXED, LONGEST_RESPONSE, MEMORY_BANDWIDTH, Cost, Site
from rljob_planner.timing.lengths import Lengths
from rljob_planner.workload import RolloutLayout, RolloutWork

_GOLDEN = (math.sqrt(5) - 1) / 2
_FEW = 1 / 8
"""Below this share of the most sequences at once a device waits for the longest ones."""


@dataclass(frozen=True)
class DecodeSpeed:
    """One engine's; all in seconds. A step of `live` sequences with `context` cached tokens together takes

    max(weights + context x kv, live x sequence_compute + context x context_compute) + fixed + live x per_sequence
    """

    weights: float
    """To read all weights but those of experts."""
    experts: float
    num_experts: int
    experts_per_token: int
    kv: float
    sequence_kv: float
    """To read what a sequence has in the cache of layers with a full sliding window."""
    sequence_compute: float
    context_compute: float
    fixed: float
    per_sequence: float

    def bounds(self, live: float, context: float) -> tuple[float, float]:
        """Of a step: reading, with the weights that so many tokens need (E (1 - (1 - k / E)^live) of the experts), and
        computing."""
        reading = self.weights + live * self.sequence_kv + context * self.kv
        if self.num_experts:
            reading += self.experts * (1 - (1 - self.experts_per_token / self.num_experts) ** live)
        return reading, live * self.sequence_compute + context * self.context_compute

    def step(self, live: float, context: float) -> float:
        """Seconds of one step."""
        return max(self.bounds(live, context)) + self.overhead(live)

    def overhead(self, live: float) -> float:
        """Of a step: what neither memory nor products take."""
        return self.fixed + live * self.per_sequence

    def steps(self, live: float, context: float, count: int) -> tuple[float, float]:
        """Seconds of `count` steps, each of which adds `live` tokens to the context, without overhead; and those of
        them in which the products take longest."""
        reading, computing = self.bounds(live, context)
        slope, steeper = live * self.kv, live * self.context_compute
        # Before and behind the place where the two lines cross, one of them is larger throughout.
        crossing = (reading - computing) / (steeper - slope) if steeper != slope else 0.0
        edge = min(count, max(0, math.ceil(crossing)))
        total = by_compute = 0.0
        for begin, end in ((0, edge), (edge, count)):
            # Of a line over whole numbers: so many times its middle.
            middle = (begin + end - 1) / 2
            memory, compute = (end - begin) * (reading + slope * middle), (end - begin) * (computing + steeper * middle)
            total += max(memory, compute)
            by_compute += compute if compute > memory else 0.0
        return total, by_compute


@dataclass(frozen=True)
class Makespan:
    """Seconds of decoding, and what of them goes where."""

    seconds: float
    in_compute: float
    """In steps that products bound."""
    in_overhead: float
    """Launches, scheduling, exchanges between GPUs."""
    in_tail: float
    """With less than an eighth of the most sequences at once under way."""
    token_steps: int
    """Tokens that are decoded one after the other."""


def makespan(
    speed: DecodeSpeed,
    prompt: float,
    lengths: Sequence[float],
    slots: int,
    *,
    weight: float = 1.0,
    refills: bool = True,
) -> Makespan:
    """Of responses that are admitted in the order of `lengths`, at most `slots` at once; each begins with `prompt`
    cached tokens. With `refills` a place that is free is taken at once (vLLM), else when all are (the Hugging Face
    engine, which decodes batch after batch). Each stands for `weight` responses of the same length."""
    running: list[tuple[int, float]] = []
    position, admitted = 0, 0
    seconds = in_compute = in_overhead = in_tail = context = 0.0
    most = min(slots, len(lengths))
    while running or admitted < len(lengths):
        if refills or not running:
            while admitted < len(lengths) and len(running) < slots:
                own = max(1, round(lengths[admitted]))
                heapq.heappush(running, (position + own, prompt + own))
                context += prompt
                admitted += 1
        live, count = len(running), running[0][0] - position
        working, by_compute = speed.steps(live * weight, context * weight, count)
        overhead = count * speed.overhead(live * weight)
        seconds += working + overhead
        in_compute += by_compute
        in_overhead += overhead
        if live < most * _FEW:
            in_tail += working + overhead
        position += count
        context += count * live
        while running and running[0][0] == position:
            context -= heapq.heappop(running)[1]
    return Makespan(seconds, in_compute, in_overhead, in_tail, position)


def mixed(ascending: Sequence[float]) -> list[float]:
    """The same lengths in an order in which long and short ones are spread evenly, as prompts come; the longest is
    neither first nor last."""
    last = len(ascending) - 1
    places = sorted(range(len(ascending)), key=lambda place: ((place - last) * _GOLDEN + 0.5) % 1)
    return [ascending[place] for place in places]


EXCHANGES_PER_LAYER = 2
"""Of tensor parallelism: after attention and after the MLP."""
_MOST_FOLLOWED = 256
"""Responses that are followed one by one; each of more stands for several."""


@dataclass(frozen=True)
class Requests:
    """What a step generates."""

    count: float
    """Responses, over all engines."""
    per_prompt: int
    prompt: float
    """Mean tokens."""
    lengths: Lengths


def decode_speed(
    work: RolloutWork, layout: RolloutLayout, site: Site, constants: Constants, mean_context: float
) -> DecodeSpeed:
    """Of one engine, whose sequences have `mean_context` tokens on average."""
    shape, parallel = work.shape, layout.tensor_parallel
    experts = shape.num_expert_layers * shape.num_experts * MLP_MATRICES * shape.hidden_size * shape.mlp_size
    others = shape.layers_parameters - experts + shape.embedding_parameters
    reading = parallel * site.gpu.bandwidth * constants.decode_bandwidth_efficiency
    computing = parallel * site.gpu.flops * constants.decode_compute_efficiency
    per_layer = parallel * kv_bytes_per_layer_token(shape, layout, work.weight_bytes)
    full, windows = shape.attention_layers
    window = min(float(shape.sliding_window or 0), mean_context)
    num_exchanges = EXCHANGES_PER_LAYER * shape.num_layers if parallel > 1 else 0
    moved = 2 * (parallel - 1) / parallel * shape.hidden_size * work.weight_bytes
    host = constants.expert_decode_step_seconds if shape.has_experts else constants.decode_step_seconds
    return DecodeSpeed(
        weights=work.weight_bytes * others / reading,
        experts=work.weight_bytes * experts / reading,
        num_experts=shape.num_experts,
        experts_per_token=shape.experts_per_token,
        kv=per_layer * full / reading,
        sequence_kv=per_layer * windows * window / reading,
        sequence_compute=(2 * shape.matmul_parameters + 4 * shape.query_size * windows * window) / computing,
        context_compute=4 * shape.query_size * full / computing,
        fixed=num_exchanges * constants.tensor_parallel_seconds + host,
        per_sequence=constants.decode_sequence_seconds + num_exchanges * moved / site.bandwidth(parallel, constants),
    )


def live_context(prompt: float, lengths: Lengths) -> float:
    """Tokens of a sequence at a random moment of its decoding: long ones are met more often, E[r^2] / 2 E[r]."""
    return prompt + lengths.mean_square / (2 * max(1.0, lengths.mean))


def generation_cost(
    work: RolloutWork,
    requests: Requests,
    layout: RolloutLayout,
    site: Site,
    sequences_at_once: float,
    constants: Constants,
) -> Cost:
    """All responses of a step. `sequences_at_once`: of one engine, by its memory and the job's own limit."""
    is_vllm = work.is_vllm
    own = max(1, math.ceil(requests.count / layout.num_engines))
    slots = max(1, min(own, work.max_sequences, int(sequences_at_once)))
    context = live_context(requests.prompt, requests.lengths)
    speed = decode_speed(work, layout, site, constants, context)
    decoding = decode_time(speed, requests.prompt, requests.lengths, own, slots, int(requests.count), refills=is_vllm)
    prompts = max(1.0, own / requests.per_prompt) if is_vllm else float(own)
    reading = prompts * _prompt_seconds(work, requests.prompt, layout, site, constants)
    each = decoding.seconds / max(1, decoding.token_steps)
    formula = (
        f"{own} responses on each of {layout.num_engines} engines, {slots} at once:"
        f" {decoding.token_steps:,} tokens one after the other x {1e3 * each:.3g} ms = {decoding.seconds:.3g} s"
        f" (with all under way {1e3 * speed.step(slots, slots * context):.3g} ms,"
        f" with one {1e3 * speed.step(1, context):.3g} ms) + prompts {reading:.3g} s"
    )
    return Cost(decoding.seconds + reading, _bound_by(decoding, reading), formula)


@lru_cache(maxsize=4096)
def decode_time(
    speed: DecodeSpeed, prompt: float, lengths: Lengths, own: int, slots: int, total: int, *, refills: bool
) -> Makespan:
    """Of an engine with `own` responses, the longest of all `total` ones among them."""
    weight = max(1, math.ceil(own / _MOST_FOLLOWED))
    followed = max(1, round(own / weight))
    ascending = [*lengths.spread_over(followed)[:-1], lengths.longest_of(max(total, own))]
    order = mixed(ascending) if slots < own else ascending
    return makespan(speed, prompt, order, max(1, round(slots / weight)), weight=own / followed, refills=refills)


def _prompt_seconds(work: RolloutWork, prompt: float, layout: RolloutLayout, site: Site, constants: Constants) -> float:
    """Of one prompt's own pass. The Hugging Face engine computes logits for all of its tokens."""
    shape = work.shape
    weights = shape.layer_matmul_parameters if work.is_vllm else shape.matmul_parameters
    efficiency = constants.forward_efficiency_of(site.gpu.name, has_experts=shape.has_experts)
    products = 2 * weights * prompt / efficiency
    attention = 2 * shape.num_layers * shape.query_size * prompt * prompt / constants.attention_efficiency
    return (products + attention) / (layout.tensor_parallel * site.gpu.flops)


def _bound_by(decoding: Makespan, reading: float) -> str:
    total = decoding.seconds + reading
    if decoding.in_overhead > total / 2:
        return FIXED
    if decoding.in_tail > total / 2:
        return LONGEST_RESPONSE
    return COMPUTE if decoding.in_compute + reading > total / 2 else MEMORY_BANDWIDTH
