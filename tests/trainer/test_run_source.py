"""Sources `run://...`: which checkpoint they name, the model that is made of it, and the errors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from rljob_api.contract_documents import TrainerJob
from rljob_api.v1alpha1.job import RLJob
from rljob_testing.messages import Mentions
from rljob_testing.models import tiny_models
from rljob_testing.training import training_runs
from rljob_trainer.checkpoints.fencing import accept_up_to, announce_start
from rljob_trainer.checkpoints.layout import MANIFEST_FILE, folder_name
from rljob_trainer.checkpoints.run_source import TrainedModel, find_run_checkpoint, write_model_config
from rljob_trainer.checkpoints.save import begin_save, commit, save_shard
from rljob_trainer.checkpoints.sharding import ShardedTensor
from rljob_trainer.controller.checks.run_models import with_run_models
from rljob_trainer.errors import ConfigurationError
from rljob_trainer.settings import Settings, read_settings

FIELD = "spec.training.model.source"
STEPS = (2, 4)


@pytest.fixture(scope="module")
def models() -> dict[int, PreTrainedModel]:
    """The model at each step."""
    found = {step: tiny_models.make("qwen3") for step in STEPS}
    with torch.no_grad():
        for tensor in found[STEPS[1]].parameters():
            tensor.add_(1)
    return found


@pytest.fixture
def run(tmp_path: Path, models: dict[int, PreTrainedModel]) -> Path:
    """The folder of a run that has saved these steps, and that has begun to save another one."""
    base = tmp_path / "base"
    models[STEPS[0]].save_pretrained(base)
    (base / "tokenizer.json").write_text("{}")
    folder = tmp_path / "runs" / "first"
    write_model_config(folder, base, TrainedModel(source=str(base)))
    root = folder / "checkpoints"
    announce_start(root, 1)
    accept_up_to(root, 1, None)
    for step, model in models.items():
        checkpoint = begin_save(root, step, 1)
        shards = [
            ShardedTensor(f"{prefix}{name}", tensor.detach(), tuple(tensor.shape), (0,) * tensor.dim())
            for name, tensor in model.named_parameters()
            for prefix in ("model.", "optimizer.exp_avg.")
        ]
        commit(root, checkpoint, step, 1, [save_shard(checkpoint, 0, shards)], {})
    begin_save(root, 6, 1)
    return folder


@pytest.mark.parametrize(
    ("source", "step"),
    [("runs/first", 4), ("runs/first@step-2", 2), ("runs/first@step-00000004", 4), ("./runs/first/", 4)],
)
def test_the_newest_complete_checkpoint_or_that_of_a_step(run: Path, source: str, step: int) -> None:
    found = find_run_checkpoint(f"run://{source}", run.parents[1], FIELD)
    assert found.checkpoint.path == run / "checkpoints" / folder_name(step, 1)
    assert found.model_config == run / "model-config"


def test_both_folders_of_a_job_on_a_cluster_are_accepted(run: Path) -> None:
    """There the checkpoints are beside the run folder."""
    (run / "model-config").rename(run.parent / "model-config")
    (run / "run").mkdir()
    (run.parent / "model-config").rename(run / "run" / "model-config")
    for source in (run, run / "run"):
        found = find_run_checkpoint(f"run://{source}", Path("/"), FIELD)
        assert (found.checkpoint.step, found.model_config) == (4, run / "run" / "model-config")


def test_a_checkpoint_of_an_outdated_start_does_not_count(run: Path) -> None:
    root = run / "checkpoints"
    announce_start(root, 2)
    accept_up_to(root, 2, find_run_checkpoint(f"run://{run}@step-2", Path("/"), FIELD).checkpoint)
    assert find_run_checkpoint(f"run://{run}", Path("/"), FIELD).checkpoint.step == 2


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("run://runs/second", ("'run://runs/second' not found", "runs/second", "check the path")),
        ("run://", ("'run://'", "write run://RUN_FOLDER")),
        ("run://" + "x" * 300, ("not found",)),
        ("run://~nobody-has-this-name/x", ("not found",)),
        ("run://s3://bucket/x", ("'run://s3://bucket/x'", "rljob get-results NAME --checkpoints")),
        ("run://runs/first@step-3", ("runs/first@step-3'", "choose one of its steps (2, 4)")),
        ("run://runs/first@step-6", ("choose one of its steps (2, 4)",)),
        ("run://base", ("'run://base' has no checkpoints", "is a model; name it without run://")),
        ("run://runs", ("'run://runs' has no checkpoints", "name the folder of a run")),
    ],
)
def test_other_sources_are_rejected(run: Path, source: str, expected: tuple[str, ...]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        find_run_checkpoint(source, run.parents[1], FIELD)
    assert str(caught.value) == Mentions(FIELD, *expected)


def test_a_run_without_a_complete_checkpoint_or_without_a_tokenizer_is_rejected(run: Path) -> None:
    for folder in (run / "checkpoints").glob("step-*"):
        (folder / MANIFEST_FILE).unlink(missing_ok=True)
    with pytest.raises(ConfigurationError, match=rf"{FIELD}: .* has no complete checkpoint .*; wait for its first"):
        find_run_checkpoint(f"run://{run}", Path("/"), FIELD)


def test_a_run_without_a_record_of_its_model_is_rejected(run: Path) -> None:
    (run / "model-config" / "config.json").unlink()
    with pytest.raises(ConfigurationError, match=rf"{FIELD}: .* no model-config/ .* name the run's export instead"):
        find_run_checkpoint(f"run://{run}", Path("/"), FIELD)


@pytest.fixture
def settings(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    assert run.is_dir()
    monkeypatch.setenv("RLJOB_SPEC", "{}")
    monkeypatch.setenv("RLJOB_RUN_FOLDER", str(tmp_path / "runs" / "second"))
    monkeypatch.setenv("RLJOB_JOB_FOLDER", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return read_settings()


def job(**training: training_runs.JsonValue) -> TrainerJob:
    roles: training_runs.Document = {"ref": {"model": {"source": "run://runs/first@step-2"}}}
    algorithm: training_runs.Document = {"kl": {"coefficient": 0.1}}
    document = training_runs.small_job(roles=roles, algorithm=algorithm, **training)
    return TrainerJob(name="small", spec=RLJob.from_wire(document).spec)


def converted(job: TrainerJob, settings: Settings, *, is_resumed: bool = False) -> list[str]:
    """The sources of the policy and of the reference."""
    spec = with_run_models(job, settings, lambda _: None, is_resumed=is_resumed).spec
    assert spec.roles.ref.model is not None
    return [spec.training.model.source, spec.roles.ref.model.source]


def test_the_models_have_the_weights_of_the_checkpoints(settings: Settings, models: dict[int, PreTrainedModel]) -> None:
    folders = converted(job(model={"source": "run://runs/first"}), settings)
    for folder, step in zip(map(Path, folders), (4, 2), strict=True):
        assert folder.is_relative_to(settings.run_folder)
        assert (folder / "tokenizer.json").read_text() == "{}"
        loaded = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
        assert loaded.dtype is torch.float32
        for name, tensor in models[step].named_parameters():
            assert torch.equal(loaded.get_parameter(name), tensor), name


def test_a_resumed_run_uses_its_own_copy(run: Path, settings: Settings) -> None:
    document = job(model={"source": "run://runs/first"})
    folders = converted(document, settings)
    run.rename(run.with_name("moved"))
    assert converted(document, settings, is_resumed=True) == folders
    with pytest.raises(ConfigurationError, match="not found"):
        converted(document, settings)


def test_a_damaged_checkpoint_is_rejected_by_its_digest(run: Path, settings: Settings) -> None:
    [file] = (run / "checkpoints" / folder_name(4, 1)).glob("rank-*")
    data = bytearray(file.read_bytes())
    # The first byte of the first tensor, behind the header.
    data[8 + int.from_bytes(data[:8], "little")] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(ConfigurationError, match=rf"{FIELD}: 'run://runs/first': the checkpoint .* is damaged .*@step"):
        converted(job(model={"source": "run://runs/first"}), settings)


def test_a_job_that_only_evaluates_does_not_convert_its_reference(settings: Settings) -> None:
    document = job(model={"source": "run://runs/first"}, steps=0, evaluations=[training_runs.held_out(4, 1)])
    policy, reference = converted(document, settings)
    assert Path(policy).is_dir()
    assert reference == "run://runs/first@step-2"
