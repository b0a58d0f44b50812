"""The error when a host has too little memory for what a run keeps there: it names the owners and the job's fields."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from rljob_api.v1alpha1.algorithm import Algorithm
from rljob_api.v1alpha1.job import RLJob
from rljob_api.v1alpha1.model import Critic
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_testing.jobs.valid_job import valid_job
from rljob_testing.messages import Mentions
from rljob_testing.training import gloo_ranks, hybrid_runs, replays
from rljob_testing.training.sleeping_engine import KEEPS, SleepingHfEngine
from rljob_trainer.controller.engine_settings import (
    actor_engine,
    critic_engine,
    reference_engine,
    reward_model_engine,
)
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.engines.host_ledger import HOST_LEDGER, HostAccount, HostUse, buffer_bytes, check_accounts
from rljob_trainer.engines.train.engine_memory import EngineMemory, copies_use, engine_uses
from rljob_trainer.engines.train.layout import ParallelLayout
from rljob_trainer.engines.train.settings import TrainEngineSettings
from rljob_trainer.errors import HostMemoryError
from rljob_trainer.host_memory import HOST_MEMORY

MIB = 2**20
OFFLOADS = {"parameters": True, "optimizer": True}
SPEC = RLJob.from_wire(
    valid_job(
        {
            "spec.training.algorithm": {"type": "PPO", "kl": {"coefficient": 0.1}},
            "spec.training.model.offload": OFFLOADS | {"reference": True},
            "spec.training.critic.model.offload": OFFLOADS,
            "spec.training.rewards[1]": {
                "name": "judge",
                "type": "RewardModel",
                "rewardModel": {"source": "owner/reward", "offload": True},
            },
        },
    )
).spec
OFFLOADED = replays.Replay(offloads=True)
SettingsOf = Callable[[RLJobSpec, torch.dtype, ParallelLayout], TrainEngineSettings]


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerContext]:
    """The only rank of a process group. Engines of earlier tests do not count, as far as they exist."""
    monkeypatch.setattr(HOST_LEDGER, "_counts", [])
    with gloo_ranks.process_group_of_one(tmp_path) as context:
        yield context


def uses_of(settings_of: SettingsOf) -> list[HostUse]:
    """The uses of an engine on a GPU with 1,023 x 255 numbers of 4 bytes and as many biases: buffers of one mebibyte
    and a kibibyte."""
    settings = replace(settings_of(SPEC, torch.float32, ParallelLayout.of(1)), device=torch.device("cuda"))
    model = nn.Linear(1023, 255)
    is_trained = settings.optimizer is not None
    memory = EngineMemory(model, torch.optim.AdamW(model.parameters()) if is_trained else None)
    return [*engine_uses(settings, memory), copies_use(settings, memory, is_first_replica=True)]


@pytest.mark.parametrize(
    ("settings_of", "expected"),
    [
        (
            actor_engine,
            {
                "actor's parameters": ("spec.training.model.offload.parameters", 1),
                "actor's moments": ("spec.training.model.offload.optimizer", 2),
                "actor's copies for checkpoints": ("spec.pools[].resources", 3),
            },
        ),
        (reference_engine, {"reference's parameters": ("spec.training.model.offload.reference", 1)}),
        (
            critic_engine,
            {
                "critic's parameters": ("spec.training.critic.model.offload.parameters", 1),
                "critic's moments": ("spec.training.critic.model.offload.optimizer", 2),
                "critic's copies for checkpoints": ("spec.pools[].resources", 3),
            },
        ),
        (
            reward_model_engine,
            {"reward model's parameters": ("spec.training.rewards[1].rewardModel.offload", 1)},
        ),
    ],
)
def test_each_use_has_its_role_its_field_and_its_rounded_size(
    settings_of: SettingsOf, expected: dict[str, tuple[str, int]]
) -> None:
    found = {use.owner: (use.field, use.num_bytes) for use in uses_of(settings_of) if use.num_bytes}
    buffers = MIB + 1024
    assert found == {owner: (field, number * buffers) for owner, (field, number) in expected.items()}


def test_pinned_buffers_are_rounded_up_to_powers_of_two() -> None:
    assert buffer_bytes([0, 1, 5, 64, 65], is_pinned=True) == 0 + 1 + 8 + 64 + 128
    assert buffer_bytes([0, 1, 5, 64, 65], is_pinned=False) == 135


def account(host: str, num_available: int | None, *uses: tuple[str, int, int]) -> HostAccount:
    found = (HostUse(owner, f"spec.{owner}", size * MIB, present * MIB) for owner, size, present in uses)
    return HostAccount(host, tuple(found), None if num_available is None else num_available * MIB)


THREE = (("copies", 30, 0), ("weights", 40, 0), ("moments", 20, 0))


def test_uses_that_fit_alone_and_not_together_are_one_error() -> None:
    for use in THREE:
        check_accounts([account("a", 64, use)])
    with pytest.raises(HostMemoryError) as caught:
        # Two processes of one host, and one of another host, which has enough.
        check_accounts([account("a", 64, *THREE[:2]), account("b", 64, THREE[0]), account("a", 65, THREE[2])])
    text = str(caught.value)
    assert text.startswith("spec.weights: ")
    assert text == Mentions(
        "host a has too little memory",
        "90.0 MiB needed, 64.0 MiB available",
        "weights 40.0 MiB (spec.weights), copies 30.0 MiB (spec.copies), moments 20.0 MiB (spec.moments)",
        "increase the memory",
        "spec.pools[].resources",
    )


@pytest.mark.parametrize(
    "accounts",
    [
        [account("a", 90, *THREE)],
        # What is allocated already is no longer available.
        [account("a", 50, ("weights", 40, 40), ("moments", 20, 0), ("copies", 30, 0))],
        [account("a", None, *THREE)],
    ],
    ids=["exactly enough", "partly allocated", "unknown"],
)
def test_enough_memory_is_no_error(accounts: list[HostAccount]) -> None:
    check_accounts(accounts)


def test_all_roles_of_a_process_are_added_up_when_they_are_built(
    context: WorkerContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients of 0.5 MiB, moments of 0.9 MiB and copies of 1.4 MiB of the actor, and as much of the critic."""
    monkeypatch.setattr(HOST_MEMORY, "available_bytes", lambda: 5 * MIB)
    ppo = replace(OFFLOADED, algorithm=Algorithm.from_wire({"type": "PPO"}), critic=Critic())
    with pytest.raises(HostMemoryError) as caught:
        hybrid_runs.hybrid_run(ppo, context, KEEPS)
    text = str(caught.value)
    assert text == Mentions("5.5 MiB needed, 5.0 MiB available")
    assert text == Mentions("actor's copies for checkpoints 1.4 MiB", "critic's copies for checkpoints 1.4 MiB")
    assert text == Mentions("actor's gradients 0.5 MiB (spec.training.model.offload.gradients)")
    assert text == Mentions("actor's moments 0.9 MiB", "critic's moments 0.9 MiB")


def test_a_pool_without_a_rollout_engine_is_checked(context: WorkerContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HOST_MEMORY, "available_bytes", lambda: 2 * MIB)
    with pytest.raises(HostMemoryError, match=r"copies for checkpoints 1\.4 MiB"):
        replays.replayed_run(OFFLOADED, context)


def test_a_rollout_engine_that_keeps_its_weights_asleep_is_added(
    context: WorkerContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HOST_MEMORY, "available_bytes", lambda: 3 * MIB)
    hybrid_runs.hybrid_run(OFFLOADED, context, None)
    monkeypatch.setattr(HOST_LEDGER, "_counts", [])
    monkeypatch.setattr(SleepingHfEngine, "kept_buffers", [MIB - 1, 5])
    with pytest.raises(HostMemoryError) as caught:
        hybrid_runs.hybrid_run(OFFLOADED, context, KEEPS)
    assert str(caught.value) == Mentions("sleeping rollout engine 1.0 MiB (spec.training.rollout.syncEverySteps)")
