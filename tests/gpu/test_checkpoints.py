"""Checkpoints of an actor on a device: the saved state is restored bit for bit, and training continues in the same
way."""

from __future__ import annotations

import json
from pathlib import Path
from threading import Event
from unittest.mock import patch

import torch

from rljob_testing import compare
from rljob_testing.gpu.device import DeviceContext
from rljob_testing.models import tiny_models
from rljob_testing.training import engine_updates
from rljob_trainer.checkpoints import save
from rljob_trainer.checkpoints.layout import ShardRecord
from rljob_trainer.checkpoints.save import begin_save, commit, save_shard
from rljob_trainer.workers.actor import ActorWorker

SAVED_STEP = 2


def saved(actor: ActorWorker, root: Path) -> Path:
    """The folder of a checkpoint, as controller and worker make it together."""
    folder = begin_save(root, SAVED_STEP, start_number=1, num_bytes=actor.num_checkpoint_bytes())
    actor.begin_checkpoint(folder)
    commit(root, folder, SAVED_STEP, 1, [actor.finish_checkpoint()], {})
    return folder


def test_saved_state_is_restored_bitwise(case: DeviceContext) -> None:
    model = tiny_models.save("qwen3 tied", case.folder / "model")
    first = engine_updates.build_actor(model, case.context)
    for step in range(SAVED_STEP):
        first.update_policy(engine_updates.random_rollout(tiny_models.VOCABULARY, step), step)
    folder = saved(first, case.folder / "checkpoints")
    expected = engine_updates.state_of(first.engine)
    second = engine_updates.build_actor(model, case.context)
    second.load_checkpoint(folder, SAVED_STEP)
    compare.assert_bitwise_equal(engine_updates.state_of(second.engine), expected)
    assert {each.device.type for _, each in second.engine.named_optimizer_state()} == {case.device.type}
    rollout = engine_updates.random_rollout(tiny_models.VOCABULARY, SAVED_STEP)
    metrics = [each.update_policy(rollout, SAVED_STEP) for each in (first, second)]
    assert metrics[0] == metrics[1]
    compare.assert_bitwise_equal(engine_updates.state_of(second.engine), engine_updates.state_of(first.engine))


def test_copies_are_taken_before_training_continues(case: DeviceContext) -> None:
    """The shards are written in the background, from host memory."""
    model = tiny_models.save("qwen3 tied", case.folder / "model")
    actor = engine_updates.build_actor(model, case.context)
    actor.update_policy(engine_updates.random_rollout(tiny_models.VOCABULARY, 0), 0)
    expected = engine_updates.state_of(actor.engine)
    root = case.folder / "checkpoints"
    folder = begin_save(root, SAVED_STEP, start_number=1, num_bytes=actor.num_checkpoint_bytes())
    is_updated = Event()

    def held(*arguments: object) -> ShardRecord:
        is_updated.wait()
        return save_shard(*arguments)  # type: ignore[arg-type]

    with patch.object(save, "save_shard", held):
        actor.begin_checkpoint(folder)
    actor.update_policy(engine_updates.random_rollout(tiny_models.VOCABULARY, 1), 1)
    is_updated.set()
    commit(root, folder, SAVED_STEP, 1, [actor.finish_checkpoint()], {})
    actor.load_checkpoint(folder, SAVED_STEP)
    compare.assert_bitwise_equal(engine_updates.state_of(actor.engine), expected)


def test_random_generators_continue_where_they_were(case: DeviceContext) -> None:
    actor = engine_updates.build_actor(tiny_models.save("qwen3 tied", case.folder / "model"), case.context)
    devices = {torch.device("cpu"), case.device}
    state = json.loads(json.dumps(actor.random_state()))
    drawn, again = [], []
    for found in (drawn, again):
        actor.restore_random_state(state)
        found += [torch.rand(4, device=device).tolist() for device in sorted(devices, key=str)]
    assert drawn == again
    assert len({tuple(each) for each in drawn}) == len(devices)
