"""How long an engine decodes a batch of responses: from finish to finish.

While the same sequences are under way, a step of decoding grows evenly with the tokens that they have in the cache, so
the steps up to the next finish are one sum. The result is that of going token by token (tests/planner shows it), in a
time that depends on the number of responses and not on how long they are.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

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
    """To read all experts."""
    num_experts: int
    experts_per_token: int
    kv: float
    sequence_kv: float
    """To read what a sequence has in the cache of layers with a full sliding window."""
    sequence_compute: float
    context_compute: float
    fixed: float
    per_sequence: float

    def reading(self, live: float) -> float:
        """Weights that so many tokens need (E (1 - (1 - k / E)^live) of the experts), and windows."""
        found = self.weights + live * self.sequence_kv
        if self.num_experts:
            found += self.experts * (1 - (1 - self.experts_per_token / self.num_experts) ** live)
        return found

    def step(self, live: float, context: float) -> float:
        """Seconds of one step."""
        by_memory = self.reading(live) + context * self.kv
        by_compute = live * self.sequence_compute + context * self.context_compute
        return max(by_memory, by_compute) + self.overhead(live)

    def overhead(self, live: float) -> float:
        """Of a step: what neither memory nor products take."""
        return self.fixed + live * self.per_sequence

    def steps(self, live: float, context: float, count: int) -> tuple[float, float]:
        """Seconds of `count` steps, each of which adds `live` tokens to the context, without overhead; and those of
        them in which the products take longest."""
        memory = _Line(self.reading(live) + context * self.kv, live * self.kv)
        compute = _Line(live * self.sequence_compute + context * self.context_compute, live * self.context_compute)
        crossing = memory.crossing(compute, count)
        first, second = (0, crossing), (crossing, count)
        # Before and behind the place where they cross, one of the two is larger throughout.
        in_first, in_second = (_larger(memory, compute, *part) for part in (first, second))
        by_compute = sum(each for each, is_compute in (in_first, in_second) if is_compute)
        return in_first[0] + in_second[0], by_compute


@dataclass(frozen=True)
class _Line:
    start: float
    slope: float

    def total(self, begin: int, end: int) -> float:
        """Over the whole numbers from `begin` to before `end`."""
        return self.start * (end - begin) + self.slope * (end * (end - 1) - begin * (begin - 1)) / 2

    def crossing(self, other: _Line, count: int) -> int:
        """The first whole number from 0 to `count` at or behind the place where the two cross; 0 where they do not."""
        slope = self.slope - other.slope
        place = (other.start - self.start) / slope if slope else 0.0
        return min(count, max(0, math.ceil(place)))


def _larger(memory: _Line, compute: _Line, begin: int, end: int) -> tuple[float, bool]:
    by_memory, by_compute = memory.total(begin, end), compute.total(begin, end)
    return max(by_memory, by_compute), by_compute > by_memory


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
