"""The hybrid engine on a device, with a generator that leaves the device while it sleeps: what it generates with, and
how much memory each side leaves to the other."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rljob_testing import compare
from rljob_testing.gpu import hybrids
from rljob_testing.gpu.device import DeviceContext
from rljob_testing.training import engine_updates
from rljob_testing.training.sleeping_engine import FORGETS, KEEPS, SleepingHfEngine
from rljob_testing.training.whole_rollouts import whole_rollout
from rljob_trainer.engines.train.offload import OffloadSettings
from rljob_trainer.observability.memory import MEMORY
from rljob_trainer.workers.columns import TOKENS
from rljob_trainer.workers.hybrid import HybridWorker

EVERYTHING = OffloadSettings(parameters=True, gradients=True, optimizer=True)
LEVELS = {KEEPS: "level 1", FORGETS: "level 2"}
NUM_STEPS = 3
LARGEST_GROWTH = 0.01
"""Of the memory in a step, relative to that of the generator."""
LEARNING_RATE = 1e-3


@dataclass
class Run:
    """What a run of NUM_STEPS steps generated, and its state at the end."""

    tokens: list[Tensor] = field(default_factory=list)
    differences: list[float] = field(default_factory=list)
    """Of log-probabilities, for each rollout."""
    state: dict[str, Tensor] = field(default_factory=dict)


def made_run(hybrid: HybridWorker) -> Run:
    """In each step two rollouts, each followed by a pass; the second is trained on."""
    run = Run()
    for step in range(NUM_STEPS):
        for seed in (2 * step, 2 * step + 1):
            rollout = whole_rollout(hybrid, hybrids.prompt_batch(100 * seed), hybrids.SHORT)
            run.tokens.append(rollout.ragged_column(TOKENS).values)
            run.differences.append(hybrids.largest_difference(hybrid, rollout))
        hybrid.actor.update_policy(hybrids.with_random_advantages(rollout, step), step)
    run.state = engine_updates.state_of(hybrid.actor.engine)
    return run


def sleeping(hybrid: HybridWorker) -> SleepingHfEngine:
    engine = hybrid.rollout.engine
    assert isinstance(engine, SleepingHfEngine)
    return engine


def test_training_is_bitwise_that_of_a_generator_that_never_sleeps(case: DeviceContext) -> None:
    for dtype, level in ((torch.float32, FORGETS), (torch.bfloat16, KEEPS)):
        expected = made_run(hybrids.hf_hybrid(case, dtype, learning_rate=LEARNING_RATE))
        hybrid = hybrids.hf_hybrid(case, dtype, level, learning_rate=LEARNING_RATE, offload=EVERYTHING)
        found = made_run(hybrid)
        name = f"{str(dtype).removeprefix('torch.')}, {LEVELS[level]}"
        assert case.note(name, max(found.differences)) < hybrids.LARGEST_DIFFERENCE[dtype]
        assert all(torch.equal(*pair) for pair in zip(found.tokens, expected.tokens, strict=True))
        compare.assert_bitwise_equal(found.state, expected.state)
        engine = sleeping(hybrid)
        assert engine.num_syncs == NUM_STEPS * (2 if level == FORGETS else 1)
        # It also goes to sleep before the first step.
        assert engine.num_sleeps == 1 + engine.num_wakes == 1 + 2 * NUM_STEPS


def test_each_side_leaves_its_memory_to_the_other(case: DeviceContext) -> None:
    """On GPUs by the allocator's count. What sleeps is not on the device, and no step leaves anything behind."""
    for level, name in LEVELS.items():
        # Engines of earlier tests have reference cycles.
        gc.collect()
        check_memory(case, level, name)


def check_memory(case: DeviceContext, level: int, name: str) -> None:
    """Some steps with a generator that sleeps at this level."""
    hybrid = hybrids.hf_hybrid(case, torch.bfloat16, level, learning_rate=LEARNING_RATE, offload=EVERYTHING)
    engine, memory = sleeping(hybrid), hybrid.actor.engine.memory
    asleep: list[int] = []
    awake: list[int] = []
    for step in range(NUM_STEPS):
        rollout = whole_rollout(hybrid, hybrids.prompt_batch(step), hybrids.SHORT)
        assert memory.parameters == memory.gradients == memory.moments == 0
        assert not engine.cache.layers
        of_generator = engine.memory.weights + engine.memory.kv_cache
        awake.append(allocated_bytes(case))
        hybrid.trainer_mode()
        freed = awake[-1] - allocated_bytes(case)
        assert case.note(f"{name}, freed by sleep / weights and KV cache", freed / of_generator) > 0.99
        hybrid.actor.update_policy(hybrids.with_random_advantages(rollout, step), step)
        hybrid.actor.engine.offload_state()
        asleep.append(allocated_bytes(case))
    # The first step allocates what libraries keep, such as cuBLAS's workspace.
    for what, found in (("awake", awake), ("asleep, trainer offloaded", asleep)):
        case.note(f"{name}, {what}, KiB", found[-1] / 1024)
        growth = (found[-1] - found[1]) / of_generator
        assert case.note(f"{name}, {what}, growth / generator", growth) <= LARGEST_GROWTH


def allocated_bytes(case: DeviceContext) -> int:
    """Bytes of all tensors on the GPU; on CPUs only what the owners of memory count."""
    if case.device.type == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()
    return sum(MEMORY.by_owner().values())
