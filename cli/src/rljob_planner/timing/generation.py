"""Time of generation: how fast one engine decodes, and how long all engines take for the responses of a step.

A decoding step computes one token of each running sequence. It takes the longer of two times: for reading all weights
and the whole KV cache, and for computing (roofline model). The time of all-reduces between the engine's GPUs, and of
the host's work, is added. The pass over the prompts is limited by compute. It runs once per prompt if the engine caches
prefixes (vLLM), otherwise once per response; conversations of several turns are in `_prompts_seconds`. The job and the
KV cache limit how many sequences run at the same time (`kv_cache`).

Engines get equal numbers of responses; all wait for the engine with the longest response.
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
from rljob_planner.timing.communication import COMPUTE, LAUNCHES, LONGEST_RESPONSE, MEMORY_BANDWIDTH, Cost, NodeType
from rljob_planner.timing.lengths import Lengths
from rljob_planner.workload import RolloutLayout, RolloutWork

_GOLDEN = (math.sqrt(5) - 1) / 2
"""Inverse of the golden ratio. Its multiples modulo 1 are spread evenly between 0 and 1."""
_FEW = 1 / 8
"""If fewer than this share of the largest number of sequences are running, the engine counts as waiting for the longest
responses."""


@dataclass(frozen=True)
class DecodeSpeed:
    """The speed of one engine; times are in seconds. A decoding step computes one token of each running sequence. With
    `live` running sequences that together have `context` cached tokens, a step takes

    max(weights + live x sequence_kv + context x kv, live x sequence_compute + context x context_compute)
        + fixed + live x per_sequence
    """

    weights: float
    """Time to read all weights except those of experts."""
    experts: float
    """Time to read the weights of all experts."""
    num_experts: int
    experts_per_token: int
    kv: float
    """Time to read one cached token in the layers with full attention."""
    sequence_kv: float
    """Time to read the cache of a sequence of mean length in the layers with a sliding window."""
    sequence_compute: float
    """Time for the matrix products of one token."""
    context_compute: float
    """Time for the attention to one cached token."""
    fixed: float
    """Time per step for the host's work and for the latency of all-reduces."""
    per_sequence: float
    """Time per running sequence and step for the host's work and for the data of all-reduces."""

    def bounds(self, live: float, context: float) -> tuple[float, float]:
        """Seconds of one step for reading memory, and for computing. The expected share of the experts that are read is
        1 - (1 - k / E)^live."""
        reading = self.weights + live * self.sequence_kv + context * self.kv
        if self.num_experts:
            reading += self.experts * (1 - (1 - self.experts_per_token / self.num_experts) ** live)
        return reading, live * self.sequence_compute + context * self.context_compute

    def step(self, live: float, context: float) -> float:
        """Seconds of one decoding step."""
        return max(self.bounds(live, context)) + self.overhead(live)

    def overhead(self, live: float) -> float:
        """Seconds of one step for the host's work and all-reduces, which are added to those for memory or compute."""
        return self.fixed + live * self.per_sequence

    def steps(self, live: float, context: float, count: int) -> tuple[float, float]:
        """Seconds of `count` steps without overhead, and the part of these seconds that is in steps limited by compute.
        Each step adds `live` tokens to the context."""
        reading, computing = self.bounds(live, context)
        slope, steeper = live * self.kv, live * self.context_compute
        # Both times grow linearly. One is larger before the lines cross, the other is larger after that.
        crossing = (reading - computing) / (steeper - slope) if steeper != slope else 0.0
        edge = min(count, max(0, math.ceil(crossing)))
        total = by_compute = 0.0
        for begin, end in ((0, edge), (edge, count)):
            # The sum of a linear function over consecutive whole numbers is their count x its value in their middle.
            middle = (begin + end - 1) / 2
            memory, compute = (end - begin) * (reading + slope * middle), (end - begin) * (computing + steeper * middle)
            total += max(memory, compute)
            by_compute += compute if compute > memory else 0.0
        return total, by_compute


@dataclass(frozen=True)
class Makespan:
    """Seconds in which an engine decodes all its responses, and parts of them (in seconds)."""

    seconds: float
    in_compute: float
    """Seconds in steps that are limited by compute."""
    in_overhead: float
    """Seconds for kernel launches, scheduling, and communication between GPUs."""
    in_tail: float
    """Seconds in steps with few running sequences (`_FEW`)."""
    token_steps: int
    """The number of decoding steps."""


def makespan(
    speed: DecodeSpeed,
    prompt: float,
    lengths: Sequence[float],
    slots: int,
    *,
    weight: float = 1.0,
    refills: bool = True,
) -> Makespan:
    """The time in which one engine decodes responses of these lengths (in tokens). The responses start in this order,
    and at most `slots` of them run at the same time.

    Args:
        prompt: cached tokens with which each response begins.
        weight: how many responses each entry of `lengths` stands for.
        refills: a free slot is filled immediately (vLLM). Otherwise new responses start when all slots are free,
            because transformers decodes one batch after the other.
    """
    running: list[tuple[int, float]] = []
    position, admitted = 0, 0
    seconds = in_compute = in_overhead = in_tail = context = 0.0
    most_live = min(slots, len(lengths))
    while running or admitted < len(lengths):
        if refills or not running:
            while admitted < len(lengths) and len(running) < slots:
                length = max(1, round(lengths[admitted]))
                heapq.heappush(running, (position + length, prompt + length))
                context += prompt
                admitted += 1
        live, count = len(running), running[0][0] - position
        working, by_compute = speed.steps(live * weight, context * weight, count)
        overhead = count * speed.overhead(live * weight)
        seconds += working + overhead
        in_compute += by_compute
        in_overhead += overhead
        if live < most_live * _FEW:
            in_tail += working + overhead
        position += count
        context += count * live
        while running and running[0][0] == position:
            context -= heapq.heappop(running)[1]
    return Makespan(seconds, in_compute, in_overhead, in_tail, position)


def mixed(ascending: Sequence[float]) -> list[float]:
    """The same lengths in another order: long and short ones are evenly mixed, as in a batch of prompts, and the
    longest is neither first nor last."""
    last = len(ascending) - 1
    order = sorted(range(len(ascending)), key=lambda index: ((index - last) * _GOLDEN + 0.5) % 1)
    return [ascending[index] for index in order]


ALL_REDUCES_PER_LAYER = 2
"""Number of all-reduces per layer with tensor parallelism: after attention and after the MLP."""
_MAX_SIMULATED = 256
"""The largest number of responses that are simulated one by one. If there are more, one simulated response stands for
several."""


@dataclass(frozen=True)
class Requests:
    """The responses that are generated in a step."""

    count: float
    """Number of responses, over all engines."""
    per_prompt: int
    prompt: float
    """Mean prompt length in tokens."""
    lengths: Lengths
    num_turns: float = 1.0
    """Mean number of turns of a response; above 1, `prompt` includes the messages between them."""


def decode_speed(
    work: RolloutWork, layout: RolloutLayout, node_type: NodeType, constants: Constants, mean_context: float
) -> DecodeSpeed:
    """The speed of one engine whose sequences have `mean_context` tokens on average."""
    shape, parallel = work.shape, layout.tensor_parallel
    experts = shape.num_expert_layers * shape.num_experts * MLP_MATRICES * shape.hidden_size * shape.mlp_size
    others = shape.layers_parameters - experts + shape.embedding_parameters
    reading = parallel * node_type.gpu.bandwidth * constants.decode_bandwidth_efficiency
    computing = parallel * node_type.gpu.flops * constants.decode_compute_efficiency
    per_layer = parallel * kv_bytes_per_layer_token(shape, layout, work.weight_bytes)
    full, windows = shape.attention_layers
    window = min(float(shape.sliding_window or 0), mean_context)
    num_all_reduces = ALL_REDUCES_PER_LAYER * shape.num_layers if parallel > 1 else 0
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
        fixed=num_all_reduces * constants.tensor_parallel_seconds + host,
        per_sequence=constants.decode_sequence_seconds
        + num_all_reduces * moved / node_type.bandwidth(parallel, constants),
    )


def live_context(prompt: float, lengths: Lengths) -> float:
    """Mean number of cached tokens of a running sequence: prompt + E[r^2] / (2 E[r]) for response lengths r. Long
    responses have a higher weight in this mean, because they run longer."""
    return prompt + lengths.mean_square / (2 * max(1.0, lengths.mean))


def generation_cost(
    work: RolloutWork,
    requests: Requests,
    layout: RolloutLayout,
    node_type: NodeType,
    sequences_at_once: float,
    constants: Constants,
) -> Cost:
    """The cost of generating all responses of a step. `sequences_at_once`: how many sequences fit into the memory of
    one engine."""
    is_vllm = work.is_vllm
    per_engine = max(1, math.ceil(requests.count / layout.num_engines))
    slots = max(1, min(per_engine, work.max_sequences, int(sequences_at_once)))
    context = live_context(requests.prompt, requests.lengths)
    speed = decode_speed(work, layout, node_type, constants, context)
    prompt, lengths = requests.prompt, requests.lengths
    decoding = decode_time(speed, prompt, lengths, per_engine, slots, int(requests.count), refills=is_vllm)
    prompt_seconds = _prompts_seconds(work, requests, per_engine, layout, node_type, constants)
    seconds_per_step = decoding.seconds / max(1, decoding.token_steps)
    formula = (
        f"{per_engine} responses on each of {layout.num_engines} engines, {slots} at once:"
        f" {decoding.token_steps:,} decoding steps x {1e3 * seconds_per_step:.3g} ms = {decoding.seconds:.3g} s"
        f" (with {slots} running {1e3 * speed.step(slots, slots * context):.3g} ms,"
        f" with one running {1e3 * speed.step(1, context):.3g} ms) + prompts {prompt_seconds:.3g} s"
    )
    return Cost(decoding.seconds + prompt_seconds, _bound_by(decoding, prompt_seconds), formula)


@lru_cache(maxsize=4096)
def decode_time(
    speed: DecodeSpeed, prompt: float, lengths: Lengths, per_engine: int, slots: int, total: int, *, refills: bool
) -> Makespan:
    """The time in which one engine decodes `per_engine` responses, one of which is the longest of all `total`
    responses."""
    weight = max(1, math.ceil(per_engine / _MAX_SIMULATED))
    simulated = max(1, round(per_engine / weight))
    ascending = [*lengths.spread_over(simulated)[:-1], lengths.longest_of(max(total, per_engine))]
    order = mixed(ascending) if slots < per_engine else ascending
    return makespan(speed, prompt, order, max(1, round(slots / weight)), weight=per_engine / simulated, refills=refills)


def _prompts_seconds(
    work: RolloutWork,
    requests: Requests,
    per_engine: int,
    layout: RolloutLayout,
    node_type: NodeType,
    constants: Constants,
) -> float:
    """Seconds of all passes over prompts in one engine.

    Messages differ between the responses of a group, so with several turns also vLLM computes them for each response,
    but each token only once. transformers computes the whole conversation again in each of the T turns: if it grows
    evenly, (T + 1) / 2 times the prompt with all messages, and (T - 1) / 2 times what is sampled."""
    once = _prompt_seconds(work, requests.prompt, layout, node_type, constants)
    if work.is_vllm:
        shared = requests.per_prompt if requests.num_turns == 1 else 1
        return max(1.0, per_engine / shared) * once
    again = (requests.num_turns - 1) / 2
    sampled = _prompt_seconds(work, requests.lengths.mean, layout, node_type, constants)
    return per_engine * ((1 + again) * once + again * sampled)


def _prompt_seconds(
    work: RolloutWork, prompt: float, layout: RolloutLayout, node_type: NodeType, constants: Constants
) -> float:
    """Seconds of the pass over one prompt. transformers computes logits for all tokens of the prompt, vLLM only for the
    last one."""
    shape = work.shape
    weights = shape.layer_matmul_parameters if work.is_vllm else shape.matmul_parameters
    efficiency = constants.forward_efficiency_of(node_type.gpu.name, has_experts=shape.has_experts)
    products = 2 * weights * prompt / efficiency
    attention = 2 * shape.num_layers * shape.query_size * prompt * prompt / constants.attention_efficiency
    return (products + attention) / (layout.tensor_parallel * node_type.gpu.flops)


def _bound_by(decoding: Makespan, prompt_seconds: float) -> str:
    """What more than half of the generation's time depends on."""
    total = decoding.seconds + prompt_seconds
    if decoding.in_overhead > total / 2:
        return LAUNCHES
    if decoding.in_tail > total / 2:
        return LONGEST_RESPONSE
    return COMPUTE if decoding.in_compute + prompt_seconds > total / 2 else MEMORY_BANDWIDTH
