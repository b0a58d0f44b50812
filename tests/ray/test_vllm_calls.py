"""The calls of vLLM's engine that the hybrid of training and generation makes on a GPU, in order.

Runs in processes of its own, without Ray."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from rljob_api.v1alpha1.model import Lora, LoraSync
from rljob_testing.models import tiny_models
from rljob_testing.models.recorded_llm_engine import RecordedLlmEngine
from rljob_testing.training import engine_updates, gloo_ranks
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.observability.memory import MEMORY

if TYPE_CHECKING:
    from rljob_trainer.engines.rollout.vllm_engine import VllmEngine

pytestmark = [pytest.mark.vllm]

LORA = Lora(rank=4, alpha=8.0, sync=LoraSync.ADAPTER)
CALLS: dict[str, Callable[[RecordedLlmEngine], object]] = {
    "load": lambda engine: engine.collective_rpc("reload_weights", {"weights_iterator": ["weights"]}),
    "adapter": lambda engine: engine.add_lora(None),
    "sleep 1": lambda engine: engine.sleep(1),
    "sleep 2": lambda engine: engine.sleep(2),
    "wake weights": lambda engine: engine.wake_up(["weights"]),
    "wake KV cache": lambda engine: engine.wake_up(["kv_cache"]),
    "add": lambda engine: engine.add_request("0", {"prompt_token_ids": [3]}, None),
    "generate": lambda engine: engine.step(),
}
MISTAKES = [
    # Weights that are random, then lost.
    ("generate",),
    ("adapter",),
    ("load", "sleep 2", "wake weights", "wake KV cache", "generate"),
    # Memory that is asleep.
    ("load", "sleep 1", "wake weights", "generate"),
    ("sleep 2", "load"),
    ("sleep 1", "wake KV cache"),
    ("sleep 1", "sleep 1"),
    # Requests that are running.
    ("load", "add", "load"),
    ("load", "add", "sleep 1"),
    # Cached prefixes.
    ("load", "add", "generate", "add"),
]


@pytest.mark.parametrize("calls", MISTAKES, ids=" ".join)
def test_calls_in_the_wrong_order_are_refused(calls: tuple[str, ...]) -> None:
    engine = RecordedLlmEngine()
    *before, mistake = calls
    for call in before:
        CALLS[call](engine)
    with pytest.raises(AssertionError):
        CALLS[mistake](engine)


def made_calls(folder: Path, keeps_weights: bool, lora: Lora | None, context: WorkerContext) -> list[list[str]]:
    """Calls while the hybrid is built, in two rollouts, in an update, and in the next rollout."""
    from rljob_testing.models import small_vllm
    from rljob_trainer.engines.rollout import vllm_engine
    from rljob_trainer.engines.rollout.vllm_start import VllmSettings
    from rljob_trainer.workers.hybrid import HybridWorker
    from rljob_trainer.workers.rollout import RolloutWorker

    engine = RecordedLlmEngine()
    settings = VllmSettings(folder, "cuda", False, torch.float32, 1, 64, 8, 0.5, 0, 0, keeps_weights)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_engine, "start_vllm", lambda _: engine)
        patch.setattr(vllm_engine, "sleep_allocator", lambda: engine.allocator)
        vllm = vllm_engine.VllmEngine(settings)
    actor = engine_updates.build_actor(folder, context, lora=lora)
    hybrid = HybridWorker(context, actor, RolloutWorker(context, lambda: vllm, 1), torch.float32, 0, others=())
    found = [engine.calls]

    def part(function: Callable[[], object]) -> None:
        engine.calls = []
        function()
        found.append(engine.calls)

    def generate() -> None:
        hybrid.begin_rollout(True)
        small_vllm.generated(hybrid.rollout.loop, 1)

    part(generate)
    part(generate)
    part(lambda: actor.update_policy(engine_updates.random_rollout(tiny_models.VOCABULARY, 0), 0))
    part(generate)
    engine.calls = []
    check_counted_memory(vllm, keeps_weights=keeps_weights)
    return found


def check_counted_memory(vllm: VllmEngine, *, keeps_weights: bool) -> None:
    """Puts the engine to sleep and wakes it. What is asleep counts with the tensors, not with the segments, which have
    buffers in pinned host memory."""
    assert vllm.memory.unmapped == 0
    vllm.sleep()
    assert vllm.memory.unmapped == MEMORY._num_unmapped() == 12 + 64 + 1
    vllm.wake(weights=True, kv_cache=False)
    assert vllm.memory.unmapped == 64
    vllm.wake(weights=False, kv_cache=True)
    assert vllm.memory.unmapped == 0
    assert vllm.kept_buffers == ([20, 2] if keeps_weights else [2])


def calls_of(folder: Path, lora: Lora | None = None, *, keeps_weights: bool) -> list[list[str]]:
    tiny_models.copy_tokenizer(tiny_models.save("qwen3", folder))
    run = gloo_ranks.RankedRun(partial(made_calls, folder, keeps_weights, lora), 1)
    [[found]] = gloo_ranks.run_on_ranks([run], gloo_ranks.VLLM)
    assert isinstance(found, list)
    return found


@pytest.mark.parametrize("level", [1, 2])
def test_weights_arrive_between_the_two_wake_ups(level: int, tmp_path: Path) -> None:
    first, rollout, again, update, last = calls_of(tmp_path, keeps_weights=level == 1)
    assert first == update == [f"sleep {level}"]
    assert rollout == last == ["wake weights", "reload", "wake kv_cache", "generate"]
    assert again == ["generate"]


def test_adapters_follow_a_base_that_is_sent_once(tmp_path: Path) -> None:
    first, rollout, again, update, last = calls_of(tmp_path, LORA, keeps_weights=True)
    assert first == update == ["sleep 1"]
    assert rollout == ["wake weights", "reload", "adapter", "wake kv_cache", "generate"]
    assert again == ["generate"]
    assert last == ["wake weights", "adapter", "wake kv_cache", "generate"]
