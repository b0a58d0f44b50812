"""The KL term in the loss and in the reward, and no reference policy where there is no KL term."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rljob_testing.training import training_runs
from rljob_trainer.groups.fused_worker import RoleSpec
from rljob_trainer.groups.worker_processes import BuildSettings, WorkerProcesses
from rljob_trainer.pools.resource_pool import Slot

pytestmark = [pytest.mark.ray]

KL_LOSS = "actor/kl_loss"
CASES: dict[str, training_runs.Document] = {
    "in the loss": {"coefficient": 0.1, "estimator": "K3", "placement": "Loss"},
    "in the reward": {"coefficient": 0.1, "estimator": "K1", "placement": "Reward"},
    "none": {"coefficient": 0.0},
}


@pytest.fixture
def roles_built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records the names of the roles that workers are built for."""
    names: list[str] = []
    build = WorkerProcesses.build

    def watched(
        self: WorkerProcesses, slots: Sequence[Slot], settings: BuildSettings, roles: Sequence[RoleSpec]
    ) -> None:
        names.extend(role.name for role in roles)
        build(self, slots, settings, roles)

    monkeypatch.setattr(WorkerProcesses, "build", watched)
    return names


@pytest.mark.parametrize("case", CASES)
def test_kl_is_reported_only_with_a_reference(
    case: str, run_trainer: training_runs.RunTrainer, cluster: str, roles_built: list[str]
) -> None:
    # A large step away from the reference, so that the second step sees a KL that is well above rounding.
    job = training_runs.small_job(
        algorithm={"kl": CASES[case]}, optimizer={"learningRate": 3.0e-3}, batchSize=8, steps=2
    )
    run = run_trainer(job, cluster)
    assert run.exit_code == 0, run.terminal
    kl = run.files.series(KL_LOSS)
    if case == "none":
        assert roles_built == ["reward", "actor", "rollout", "hybrid"]
        assert kl == []
        assert run.files.series("timing_s/ref") == []
        return
    assert roles_built == ["reward", "actor", "ref", "rollout", "hybrid"]
    assert len(run.files.series("timing_s/ref")) == 2
    # At the first step policy and reference are the same model.
    assert kl[0] == pytest.approx(0.0, abs=1e-6)
    assert kl[1] > 1e-3
