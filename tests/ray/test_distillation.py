"""Distillation in a whole run: without rewards and groups, on a pool of the teacher's own, with adapters, resumed."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest

from rljob_testing.models import tiny_models
from rljob_testing.training import training_runs

pytestmark = [pytest.mark.ray]

TEACHER_KL = "actor/teacher_kl"
NUM_STEPS = 3


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of another architecture and width, with the policy's tokenizer."""
    folder = tiny_models.save("llama", tmp_path_factory.mktemp("teacher"))
    tiny_models.copy_tokenizer(folder)
    return folder


def job(teacher: Path, ref: training_runs.Document, **training: training_runs.Document) -> training_runs.Document:
    """One response to each of 16 prompts, no reward, and a learning rate that moves the policy well."""
    return training_runs.small_job(
        num_workers=2,
        roles={"ref": {"model": {"source": str(teacher)}, **ref}},
        algorithm={"type": "Distillation"},
        optimizer={"learningRate": 3.0e-3},
        rewards=[],
        batchSize=16,
        steps=NUM_STEPS,
        rollout={"groupSize": 1},
        **training,
    )


def ended(folder: Path, document: training_runs.Document, cluster: str, *, attempt: int = 1) -> training_runs.Ended:
    """A run that must have succeeded."""
    folder.mkdir(exist_ok=True)
    run = training_runs.RunTrainer(folder)(document, cluster, attempt=attempt)
    assert run.exit_code == 0, run.terminal
    return run


@pytest.fixture(scope="module")
def together(teacher: Path, cluster: str, tmp_path_factory: pytest.TempPathFactory) -> training_runs.RunFiles:
    """The teacher on the actor's pool."""
    return ended(tmp_path_factory.mktemp("together"), job(teacher, {}), cluster).files


def test_the_kl_to_the_teacher_falls_without_rewards(together: training_runs.RunFiles) -> None:
    kl = together.series(TEACHER_KL)
    assert len(kl) == NUM_STEPS
    assert kl[-1] < kl[0] - 0.05
    assert together.series("actor/kl_loss") == []
    assert together.series("critic/rewards/mean") == []
    assert together.state().progress.reward_mean is None
    assert together.series("actor/grad_norm")[0] > 0
    [first] = [row for row in together.metrics() if row.get("step") == 1]
    assert first["outcome/excluded_fraction"] == 0


def test_a_resumed_run_is_bitwise_the_same(
    together: training_runs.RunFiles, teacher: Path, cluster: str, tmp_path: Path
) -> None:
    shutil.copytree(together.folder.parent, tmp_path / "resumed")
    [newest] = together.checkpoints.glob(f"step-{NUM_STEPS:08d}.*")
    # Without its manifest a checkpoint does not count.
    (tmp_path / "resumed" / "run" / "checkpoints" / newest.name / "manifest.json").unlink()
    run = ended(tmp_path / "resumed", job(teacher, {}), cluster, attempt=2)
    assert f"resumed from step {NUM_STEPS - 1} " in run.terminal
    assert run.files.series(TEACHER_KL) == together.series(TEACHER_KL)
    assert run.files.exported_weights() == together.exported_weights()


@pytest.mark.long
def test_a_teacher_on_its_own_pool_computes_the_same(
    together: training_runs.RunFiles, teacher: Path, cluster: str, tmp_path: Path
) -> None:
    document = training_runs.merged(job(teacher, {"pool": "teachers"}), {"spec": {}})
    spec = document["spec"]
    assert isinstance(spec, dict)
    assert isinstance(spec["pools"], list)
    spec["pools"] = [*spec["pools"], {"name": "teachers", "gpusPerNode": 1}]
    apart = ended(tmp_path / "apart", document, cluster).files
    for name in (TEACHER_KL, "actor/grad_norm", "response_length/mean"):
        assert apart.series(name) == pytest.approx(together.series(name), rel=1e-5, abs=1e-7), name


@pytest.mark.long
def test_with_adapters_the_reference_is_the_teacher_and_not_the_base_model(
    together: training_runs.RunFiles, teacher: Path, cluster: str, tmp_path: Path
) -> None:
    lora: training_runs.Document = {"lora": {"rank": 4, "sync": "Merged"}, "offload": {"reference": True}}
    found = ended(tmp_path / "adapters", job(teacher, {}, model=lora), cluster).files.series(TEACHER_KL)
    # Adapters are 0 at the start, so the first step is that of a job that trains all weights.
    assert found[0] == pytest.approx(together.series(TEACHER_KL)[0], rel=1e-4)
    assert found[0] > 0.1
    assert found[-1] < found[0]
    assert all(map(math.isfinite, found))
