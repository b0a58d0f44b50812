"""Compares the planner's memory of a train engine with torch's memory tracker on fake tensors (`memory_oracle`), for
whole models with their public configurations and all layers, in three layouts.

A measurement is a layout and a way of training; its rows are models. Both numbers are bytes of the first rank at the
peak of an update of two micro-batches after the first update, or of a forward pass of a frozen model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rljob_bench.report import Bar, Measurement
from rljob_testing.planner import memory_oracle

DENSE = (
    "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-4B",
    "Qwen/Qwen3-8B",
    "Qwen/Qwen2.5-7B",
    "meta-llama/Llama-3.1-8B",
    "Qwen/Qwen3-32B",
    "meta-llama/Llama-3.1-70B",
)
WITH_EXPERTS = ("Qwen/Qwen3-30B-A3B",)
MAX_DENSE_ERROR, MAX_EXPERTS_ERROR = 0.03, 0.10
TOKENS = 16_384
"""Tokens of a rank and micro-batch. With sequence parallelism it is a quarter, so that the rows stay the same."""
ADAPTER_RANK = 16


@dataclass(frozen=True)
class MemoryGroup:
    """One measurement; the model of `case` is filled in later."""

    title: str
    case: memory_oracle.MemoryCase


def memory_groups() -> list[MemoryGroup]:
    """All of them."""
    shards = memory_oracle.MemoryCase("", num_shards=8, tokens_of_rank=TOKENS)
    layouts = {
        "8 shards": shards,
        "2 replicas x 8 shards": memory_oracle.MemoryCase("", num_shards=8, num_replicas=2, tokens_of_rank=TOKENS),
        "8 shards, 4 sequence ranks": memory_oracle.MemoryCase(
            "", num_shards=8, sequence_parallel=4, tokens_of_rank=TOKENS // 4
        ),
    }
    found = []
    for name, case in layouts.items():
        found.append(MemoryGroup(f"{name}, activations recomputed", case.changed(recomputed_every=1)))
        found.append(MemoryGroup(f"{name}, activations kept", case))
    found.append(
        MemoryGroup("8 shards, LoRA, activations recomputed", shards.changed(recomputed_every=1, rank=ADAPTER_RANK))
    )
    found.append(MemoryGroup("8 shards, LoRA, activations kept", shards.changed(rank=ADAPTER_RANK)))
    found.append(MemoryGroup("8 shards, frozen", shards.changed(is_trained=False)))
    return found


def measured(case: memory_oracle.MemoryCase) -> tuple[memory_oracle.Tracked, memory_oracle.Planned]:
    """The tracker's result and the planner's prediction."""
    return memory_oracle.peak_by_tracker(case.oracle()), memory_oracle.peak_by_planner(case)


def memory_measurements(*, is_quick: bool) -> Iterator[Measurement]:
    """Makes the measurements one by one. `is_quick`: only the smallest dense model and the smallest one with
    experts."""
    models = (DENSE[0], *WITH_EXPERTS) if is_quick else (*DENSE, *WITH_EXPERTS)
    for group in memory_groups():
        yield of_memory(group.title, {name: measured(group.case.changed(model=name)) for name in models})


def of_memory(title: str, results: dict[str, tuple[memory_oracle.Tracked, memory_oracle.Planned]]) -> Measurement:
    """A table of sizes in GB (1e9 bytes)."""
    rows: dict[str, tuple[float | None, ...]] = {}
    errors: dict[str, float] = {}
    for name, (found, peak) in results.items():
        errors[name] = peak.whole / found.whole - 1
        rows[name] = (
            found.resident / 1e9,
            peak.resident / 1e9,
            found.whole / 1e9,
            peak.whole / 1e9,
            100 * errors[name],
        )
    bars = []
    for names, text, limit in ((DENSE, "dense", MAX_DENSE_ERROR), (WITH_EXPERTS, "with experts", MAX_EXPERTS_ERROR)):
        chosen = [abs(errors[name]) for name in names if name in errors]
        if chosen:
            bars.append(Bar(f"{text}: at most {100 * limit:g} % from the tracker", max(chosen), limit))
    header = ("resident: tracker, GB", "planner, GB", "peak: tracker, GB", "planner, GB", "difference, %")
    return Measurement(f"Memory of a train engine: {title}", header, rows, tuple(bars), num_decimals=2)
