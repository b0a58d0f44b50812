"""The memory of a process with an allocator that counts tensors although they are not on the device. The counter and
the owners are stand-ins; no GPU is used."""

from __future__ import annotations

from dataclasses import dataclass

from rljob_trainer.observability.memory import MEBIBYTE, Boundary, Bytes, MemoryRecorder, Owner
from rljob_trainer.observability.spans import Counts, SpanRecorder
from rljob_trainer.observability.timeline import MEMORY_PEAK_TRACK, MEMORY_TRACK

GIB = 2**30
WEIGHTS, KV_CACHE, PARAMETERS = 16 * GIB, 24 * GIB, 8 * GIB


class Counter:
    """Counts all tensors, also those that are not on the device."""

    is_used = True

    def __init__(self) -> None:
        self.now = self.peak = 0

    def allocated(self) -> int:
        return self.now

    def take_peak(self) -> int:
        taken, self.peak = self.peak, self.now
        return taken

    def add(self, num_bytes: int) -> None:
        """Allocates or, if negative, frees."""
        self.now += num_bytes
        self.peak = max(self.peak, self.now)


@dataclass
class Engine:
    """A rollout engine and a trainer with parameters."""

    has_weights: bool = True
    has_kv_cache: bool = True

    def memory(self) -> Bytes:
        return {
            Owner.PARAMETERS: PARAMETERS,
            Owner.ROLLOUT_WEIGHTS: WEIGHTS if self.has_weights else 0,
            Owner.KV_CACHE: KV_CACHE if self.has_kv_cache else 0,
        }

    def unmapped(self) -> int:
        return (0 if self.has_weights else WEIGHTS) + (0 if self.has_kv_cache else KV_CACHE)


def test_what_sleeps_is_not_on_the_device() -> None:
    spans, counter, engine = SpanRecorder(), Counter(), Engine()
    recorder = MemoryRecorder(spans, counter)
    recorder.watch(engine.memory)
    recorder.watch_unmapped(engine.unmapped)
    counter.add(PARAMETERS + WEIGHTS + KV_CACHE)
    recorder.mark(Boundary.GENERATE)
    engine.has_weights = engine.has_kv_cache = False
    recorder.mark(Boundary.SLEEP)
    # A pass: activations, then a part of them.
    counter.add(5 * GIB)
    counter.add(-4 * GIB)
    recorder.mark(Boundary.OLD_LOGPROBS)
    counter.add(-GIB)
    recorder.mark(Boundary.STEP_BEFORE)
    engine.has_weights = True
    recorder.mark(Boundary.WAKE_WEIGHTS)
    # Buckets.
    counter.add(2 * GIB)
    counter.add(-2 * GIB)
    recorder.mark(Boundary.SYNC_WEIGHTS)
    engine.has_kv_cache = True
    recorder.mark(Boundary.WAKE_KV_CACHE)

    counts = [each for each in spans.take() if isinstance(each, Counts)]
    memory = {
        each.after: {owner: round(size * MEBIBYTE) for owner, size in each.values.items()}
        for each in counts
        if each.track == MEMORY_TRACK
    }
    peaks = {
        each.after: round(sum(each.values.values()) * MEBIBYTE) for each in counts if each.track == MEMORY_PEAK_TRACK
    }
    awake = PARAMETERS + WEIGHTS + KV_CACHE
    assert {after: sum(found.values()) for after, found in memory.items()} == {
        "generate": awake,
        "sleep": PARAMETERS,
        "old_logprobs": PARAMETERS + GIB,
        "step_before": PARAMETERS,
        "wake_weights": PARAMETERS + WEIGHTS,
        "sync_weights": PARAMETERS + WEIGHTS,
        "wake_kv_cache": awake,
    }
    others = {after: found["other"] for after, found in memory.items()}
    assert others == dict.fromkeys(memory, 0) | {"old_logprobs": GIB}
    assert peaks == {
        "generate": awake,
        # Everything was awake until then.
        "sleep": awake,
        "old_logprobs": PARAMETERS + 5 * GIB,
        "step_before": PARAMETERS + GIB,
        "wake_weights": PARAMETERS + WEIGHTS,
        "sync_weights": PARAMETERS + WEIGHTS + 2 * GIB,
        "wake_kv_cache": awake,
    }
    metrics = recorder.take_metrics()
    assert metrics["memory/other_bytes_max"] == GIB
    assert metrics["memory/during_old_logprobs_bytes_max"] == PARAMETERS + 5 * GIB


def test_an_engine_that_is_gone_counts_no_longer() -> None:
    counter, engine = Counter(), Engine(has_weights=False, has_kv_cache=False)
    recorder = MemoryRecorder(SpanRecorder(), counter)
    recorder.watch(engine.memory)
    recorder.watch_unmapped(engine.unmapped)
    counter.add(50 * GIB)
    assert recorder.by_owner()[Owner.OTHER] == 50 * GIB - WEIGHTS - KV_CACHE - PARAMETERS
    del engine
    assert recorder.by_owner()[Owner.OTHER] == 50 * GIB
