"""Generation: how fast one engine decodes, and how long all engines take for a step's responses.

A step of decoding reads all weights and the whole cache, or waits for its products, whichever takes longer (a
roofline); exchanges between the GPUs of an engine and the host's part come on top. The prompts' own pass is bound by
products and made once per prompt where the engine keeps prefixes (vLLM), else for every response. How many sequences
are under way at once is limited by the job and by the cache (`kv_cache`).

Responses are dealt out to engines in equal numbers; all wait for the one that has the longest response.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from rljob_planner.constants import Constants
from rljob_planner.placement import RolloutLayout
from rljob_planner.timing.costs import COMPUTE, FIXED, LONGEST_RESPONSE, MEMORY_BANDWIDTH, Cost, Site
from rljob_planner.timing.lengths import Lengths
from rljob_planner.timing.makespan import DecodeSpeed, Makespan, makespan, mixed
from rljob_planner.workload import EngineKind, RolloutWork

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
    experts = shape.num_expert_layers * shape.num_experts * (3 if shape.has_mlp_gate else 2)
    experts *= shape.hidden_size * shape.mlp_size
    others = shape.layers_parameters - experts + shape.embedding_parameters
    reading = parallel * site.gpu.bandwidth * constants.decode_bandwidth_efficiency
    computing = parallel * site.gpu.flops * constants.decode_compute_efficiency
    # A head of keys and values is the least that a GPU can hold.
    cut = min(parallel, max(1, shape.num_kv_heads)) / parallel
    per_layer = work.weight_bytes * shape.kv_numbers_per_token / cut
    full, windows = _layers(work)
    window = min(float(shape.sliding_window or 0), mean_context)
    exchanges, per_sequence = 0.0, constants.decode_sequence_seconds
    if parallel > 1:
        num_exchanges = EXCHANGES_PER_LAYER * shape.num_layers
        exchanges = num_exchanges * constants.tensor_parallel_seconds
        moved = 2 * (parallel - 1) / parallel * shape.hidden_size * work.weight_bytes
        per_sequence += num_exchanges * moved / site.bandwidth(parallel, constants)
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
        fixed=exchanges + host,
        per_sequence=per_sequence,
    )


def _layers(work: RolloutWork) -> tuple[int, int]:
    """Layers that see all of a sequence, and those with a window."""
    shape = work.shape
    if shape.sliding_window is None or shape.num_full_attention_layers is None:
        return shape.num_layers, 0
    return shape.num_full_attention_layers, shape.num_layers - shape.num_full_attention_layers


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
    is_vllm = work.engine is EngineKind.VLLM
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
    weights = shape.layer_matmul_parameters if work.engine is EngineKind.VLLM else shape.matmul_parameters
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
