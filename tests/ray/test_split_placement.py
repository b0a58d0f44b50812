"""A reference policy, critic or reward model on GPUs of its own computes the same as on the actor's GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from rljob_api.constants import LOGS_FOLDER
from rljob_testing.messages import Mentions
from rljob_testing.models import tiny_models
from rljob_testing.training import training_runs

pytestmark = [pytest.mark.ray]

SERIES = ("actor/kl_loss", "actor/grad_norm", "critic/rewards/mean", "response_length/mean")
PPO_SERIES = (
    "critic/vf_loss",
    "critic/grad_norm",
    "critic/vf_explained_var",
    "reward/liking/mean",
    "reward/liking/max",
)
RULES = {"Loss": "GRPO", "Reward": "PPO"}
"""The recipe for each placement of the KL."""


def job(
    placement: str, reward_model: Path, *, reference_pool: training_runs.Document | None = None
) -> training_runs.Document:
    """A job with two actors and three steps, with a learning rate that moves the policy well away from the reference.
    PPO takes two updates per step, so that differences add up; it also has a reward model beside the function."""
    rule = RULES[placement]
    liking = {"name": "liking", "weight": 0.1, "type": "RewardModel", "rewardModel": {"source": str(reward_model)}}
    document = training_runs.small_job(
        num_workers=2,
        algorithm={"type": rule, "kl": {"coefficient": 0.1, "estimator": "K3", "placement": placement}},
        optimizer={"learningRate": 1.0e-3 if rule == "PPO" else 3.0e-3},
        steps=3,
        **({"critic": {"optimizer": {"learningRate": 1.0e-3}}, "miniBatchSize": 2} if rule == "PPO" else {}),
    )
    spec = cast(training_runs.Document, document["spec"])
    if rule == "PPO":
        training = cast(training_runs.Document, spec["training"])
        training["rewards"] = [*cast(list[training_runs.Document], training["rewards"]), liking]
    if reference_pool is not None:
        spec["pools"] = [*cast(list[training_runs.Document], spec["pools"]), reference_pool]
        spec["roles"] = {"ref": {"pool": reference_pool["name"]}}
        if placement == "Reward":
            # Whole copies that share the tokens of rows: a run in another layout gives the same results.
            spec["roles"]["actor"] = {"shardSize": 1, "sequenceParallel": 2}
            spec["roles"]["critic"] = spec["roles"]["rewardModel"] = {"pool": reference_pool["name"]}
    return document


@pytest.mark.parametrize("placement", [pytest.param("Loss", marks=pytest.mark.long), "Reward"])
def test_moving_other_roles_to_their_own_gpus_changes_nothing(placement: str, cluster: str, tmp_path: Path) -> None:
    reward_model = tiny_models.save_scoring(tmp_path / "reward-model")
    together = ended_run(tmp_path / "together", job(placement, reward_model), cluster).files
    # One worker of each role for two actors: their data is split differently, and 16 rows come back in two parts.
    judges: training_runs.Document = {"name": "judges", "gpusPerNode": 1}
    run = ended_run(tmp_path / "apart", job(placement, reward_model, reference_pool=judges), cluster)
    apart = run.files
    of_ppo = PPO_SERIES if RULES[placement] == "PPO" else ()
    assert len(apart.series("critic/vf_loss")) == (3 if of_ppo else 0)
    for name in (*SERIES, *of_ppo):
        assert apart.series(name) == pytest.approx(together.series(name), rel=1e-5, abs=1e-7), name
    assert apart.series("actor/kl_loss")[-1] > 1e-3
    # The host memory of all pools is added up.
    [line] = [line for line in run.terminal.splitlines() if "host memory: " in line]
    assert line == Mentions("actor's copies for checkpoints", *(["critic's copies for checkpoints"] if of_ppo else []))
    logs = apart.folder / LOGS_FOLDER
    assert sorted(str(path.relative_to(logs)) for path in logs.rglob("worker-*.log")) == [
        "judges/worker-0.log",
        "main/worker-0.log",
        "main/worker-1.log",
    ]


def ended_run(folder: Path, document: training_runs.Document, cluster: str) -> training_runs.Ended:
    """A run that must have succeeded."""
    folder.mkdir()
    run = training_runs.RunTrainer(folder)(document, cluster)
    assert run.exit_code == 0, run.terminal
    return run
