"""A generator that sleeps and forgets, on a device with too little memory for both sides: training is the same."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rljob_api.v1alpha1.algorithm import Algorithm
from rljob_api.v1alpha1.model import Critic, Lora, LoraSync
from rljob_api.v1alpha1.optimizer import Optimizer
from rljob_testing import compare
from rljob_testing.training import hybrid_runs, replays
from rljob_testing.training.sleeping_engine import FORGETS, KEEPS
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.observability.metrics import LOGPROB_DIFF_MAX, SAMPLING_ROUNDS

REPLAY = replays.Replay(optimizer=Optimizer(learning_rate=1e-3), num_steps=3, offloads=True)
RUNS = {
    "DAPO": (replace(REPLAY, algorithm=Algorithm.from_wire({"type": "DAPO"}), mini_batch_size=2), FORGETS),
    "PPO": (
        replace(REPLAY, algorithm=Algorithm.from_wire({"type": "PPO"}), critic=Critic(warmup_steps=1)),
        KEEPS,
    ),
    "LoRA": (replace(REPLAY, lora=Lora(rank=4, alpha=8.0, sync=LoraSync.MERGED)), FORGETS),
}


@pytest.mark.parametrize("name", RUNS)
def test_training_is_bitwise_that_of_a_generator_that_never_sleeps(name: str, context: WorkerContext) -> None:
    replay, level = RUNS[name]
    awake = hybrid_runs.hybrid_run(replay, context, None)
    asleep = hybrid_runs.hybrid_run(replay, context, level)
    expected, found = awake.steps(0, 3), asleep.steps(0, 3)
    compare.assert_bitwise_equal(asleep.run.state(), awake.run.state())
    assert found == expected
    agreement = [each[LOGPROB_DIFF_MAX] for each in found if LOGPROB_DIFF_MAX in each]
    assert len(agreement) == 3 - (replay.critic is not None)
    assert max(agreement) < 1e-4
    if name == "DAPO":
        assert max(each[SAMPLING_ROUNDS] for each in found) > 1
