"""The error when host memory is too small for offloaded state: it names the role and the job's field."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from rljob_api.v1alpha1.job import RLJob
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_testing.jobs.valid_job import valid_job
from rljob_testing.messages import Mentions
from rljob_testing.training import gloo_ranks
from rljob_trainer.controller.engine_settings import (
    actor_engine,
    critic_engine,
    reference_engine,
    reward_model_engine,
)
from rljob_trainer.engines.train.engine_memory import EngineMemory, check_host_memory
from rljob_trainer.engines.train.layout import ParallelLayout
from rljob_trainer.engines.train.settings import TrainEngineSettings
from rljob_trainer.errors import ResourceError
from rljob_trainer.host_memory import HOST_MEMORY

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


@pytest.fixture(autouse=True)
def small_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Half a mebibyte is left."""
    monkeypatch.setattr(HOST_MEMORY, "available_bytes", lambda: 2**19)
    with gloo_ranks.process_group_of_one(tmp_path):
        yield


@pytest.mark.parametrize(
    ("settings_of", "expected"),
    [
        (actor_engine, Mentions("spec.training.model.offload:", "actor's parameters")),
        (reference_engine, Mentions("spec.training.model.offload.reference:", "reference's parameters")),
        (critic_engine, Mentions("spec.training.critic.model.offload:", "critic's parameters")),
        (reward_model_engine, Mentions("spec.training.rewards[1].rewardModel.offload:", "reward model's parameters")),
    ],
)
def test_the_role_and_its_field_are_named(
    settings_of: Callable[[RLJobSpec, torch.dtype, ParallelLayout], TrainEngineSettings], expected: Mentions
) -> None:
    settings = replace(settings_of(SPEC, torch.float32, ParallelLayout.of(1)), device=torch.device("cuda"))
    model = nn.Linear(1023, 256)
    is_trained = settings.optimizer is not None
    memory = EngineMemory(model, torch.optim.AdamW(model.parameters()) if is_trained else None)
    with pytest.raises(ResourceError) as caught:
        check_host_memory(settings, memory)
    assert str(caught.value) == expected
    assert str(caught.value) == Mentions("too little memory", "0.5 MiB available", "increase the pool's memory")
    assert ("optimizer" in str(caught.value)) == is_trained
    # 1,024 x 256 numbers of 4 bytes, with the bias; the moments take twice as much.
    assert str(caught.value) == Mentions(f"{3 if is_trained else 1}.0 MiB needed")
