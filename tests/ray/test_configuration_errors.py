"""Jobs that can never work are rejected with exit code 2, a path and advice, before Ray or a device is used. Clusters
that are too small or do not respond give exit code 75, because a retry elsewhere may work."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from shutil import copytree

import pyarrow
import pyarrow.parquet
import pytest
import ray
from ray.exceptions import RaySystemError
from ray.util import placement_group_table
from transformers import BertConfig

from rljob_api.contract_documents import TrainerJob, dump_job
from rljob_api.v1alpha1.job import RLJob
from rljob_api.v1alpha1.model import Dtype, Lora, LoraSync
from rljob_api.v1alpha1.rollout import Compile, RolloutEngine
from rljob_cli.local.run_folder import RunFolder
from rljob_testing.messages import Mentions
from rljob_testing.models import tiny_models
from rljob_testing.training import training_runs
from rljob_testing.training.fake_liger import FakeLiger
from rljob_testing.training.user_algorithms import ALGORITHM_MODULE
from rljob_trainer.controller import run_workers
from rljob_trainer.controller.auto_settings import AutoSettings
from rljob_trainer.controller.build_run import built_run
from rljob_trainer.errors import ConfigurationError, ResourceError
from rljob_trainer.groups import ray_session as ray_session_module
from rljob_trainer.groups.ray_session import ray_session
from rljob_trainer.settings import read_settings

pytestmark = [pytest.mark.ray]


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the test fail when the trainer starts or connects to Ray."""

    def refuse(*_: object) -> None:
        raise AssertionError("Ray was started or connected to")

    monkeypatch.setattr(run_workers, "ray_session", refuse)


def reasoning_gym(task: str) -> training_runs.Document:
    return {"type": "ReasoningGym", "file": None, "reasoningGym": {"task": task, "size": 8}}


def with_function(part: str, name: str) -> training_runs.Document:
    """A spec with an `advantage` or a `loss` that is a user's function."""
    return training_runs.small_job(
        algorithm={part: {"type": "Function", "function": {"path": f"bad_algorithm:{name}"}}}
    )


MATH: training_runs.Document = {"type": "MathAnswer", "numProcesses": 1}

CASES: dict[str, tuple[training_runs.Document, str]] = {
    "pattern that no response can match": (
        training_runs.small_job(rewards=[{"type": "Format", "format": {"pattern": "<answer>.*</answer>"}}]),
        r"rewards\[0\]\.format\.pattern .* can never match, .*'<answer>'",
    ),
    "missing model folder": (
        training_runs.small_job(model={"source": "./not-there"}),
        r"spec\.training\.model\.source: .*not-there",
    ),
    # Where the package is not installed either, which would not help.
    "kernels for GPUs on CPUs": (
        training_runs.small_job(model={"kernels": "Liger"}),
        r"model\.kernels: Liger needs GPUs \(seen: cpu\); set Plain",
    ),
    "folder without a model": (training_runs.small_job(model={"source": "./empty"}), r"empty has no config\.json"),
    "missing file": (
        training_runs.small_job(dataset={"file": {"path": "gone.jsonl"}}),
        r"spec\.training\.dataset.*gone\.jsonl",
    ),
    "unreadable row": (
        training_runs.small_job(dataset={"file": {"path": "rows.jsonl"}}),
        r"rows\.jsonl, line 2: not valid JSON",
    ),
    "row without a prompt": (
        training_runs.small_job(dataset={"file": {"path": "other.jsonl"}}),
        r"other\.jsonl, line 2: .*prompt",
    ),
    "prompt too long": (training_runs.small_job(dataset={"maxPromptTokens": 3}), r"maxPromptTokens"),
    "unknown task": (
        training_runs.small_job(dataset=reasoning_gym("no_such_task")),
        r"dataset\.reasoningGym: .*'no_such_task'",
    ),
    "unknown layers for adapters": (
        training_runs.small_job(model={"lora": {"targets": ["q_proj", "query"]}}),
        r"model\.lora\.targets: no linear layer .* is called 'query'; name some of down_proj, .*, v_proj, or",
    ),
    "chat that the template refuses": (
        training_runs.small_job(model={"source": "./chatting"}, dataset={"file": {"path": "chats.jsonl"}}),
        r"chats\.jsonl, line 2: .*chat template rejects column 'prompt' \(roles: system, user\): "
        r"the chat template of .*chatting failed: no system role; change the row or the template",
    ),
    "Parquet text that is not UTF-8": (
        training_runs.small_job(dataset={"file": {"path": "rows.parquet"}}),
        r"rows\.parquet, row 2: column 'prompt' cannot be read \(UnicodeDecodeError: .*0xff",
    ),
    "damaged generation settings": (
        training_runs.small_job(model={"source": "./damaged"}),
        r"spec\.training\.model\.source: .*damaged/generation_config\.json is not valid JSON .*; it may be truncated",
    ),
    "rows beyond the model's positions": (
        # The data is not read: one of its rows cannot be.
        training_runs.small_job(dataset={"file": {"path": "rows.jsonl"}}, rollout={"maxNewTokens": 64}),
        r"spec\.training\.dataset\.maxPromptTokens \(8\) and spec\.training\.rollout\.maxNewTokens \(64\): .*65 tokens",
    ),
    "the longest row beyond the model's positions": (
        training_runs.small_job(rollout={"maxNewTokens": 63}),
        r"maxNewTokens \(63\): the longest prompt \(6 tokens\) .* 69 tokens, .* 64",
    ),
    "missing reward function": (
        training_runs.small_job(rewards=[training_runs.function_reward("json:no_such_function", name="style")]),
        r"spec\.training\.rewards\[0\]\.function\.path \(reward style\): .*no_such_function",
    ),
    "answers that are dictionaries": (
        training_runs.small_job(
            dataset={"file": {"path": "verl.jsonl"}, "answerField": "reward_model"}, rewards=[MATH]
        ),
        r"answerField: 1 of 1 rows .* such as `answerField: reward_model\.ground_truth`\n.*verl\.jsonl, line 1:",
    ),
    "answer that cannot be scored": (
        training_runs.small_job(dataset={"file": {"path": "answers.jsonl"}}, rewards=[MATH]),
        r"answerField: 1 of 2 rows .*\n.*answers\.jsonl, line 2: the answer is the string '.*', which cannot be",
    ),
    "missing loss function": (
        with_function("loss", "no_such_loss"),
        r"spec\.training\.algorithm\.loss\.function\.path: module bad_algorithm .* has no 'no_such_loss'",
    ),
    "advantage that is no number": (
        with_function("advantage", "normalized"),
        r"advantage\.function\.path: bad_algorithm:normalized .*NaN.* 4 of 12 .* reward is 1;.*\n\(.*made-up",
    ),
    "loss of another shape": (
        with_function("loss", "per_row"),
        r"loss\.function\.path: bad_algorithm:per_row .*\[3\] of float32; .*one loss per token",
    ),
}


def write_user_files(folder: Path) -> None:
    """Writes the data and models that CASES name."""
    chats = [[{"role": role, "content": "1>"} for role in roles] for roles in (["user"], ["system", "user"])]
    (folder / "chats.jsonl").write_text("".join(json.dumps({"prompt": chat, "answer": "1"}) + "\n" for chat in chats))
    copytree(tiny_models.QUICKSTART_MODEL, folder / "chatting")
    (folder / "chatting" / "chat_template.jinja").write_text(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "{{ messages[0].content }}"
    )
    copytree(tiny_models.QUICKSTART_MODEL, folder / "damaged")
    (folder / "damaged" / "generation_config.json").write_text('{"eos_token_id": [1, ')
    values = pyarrow.array([b"1>", b"\xff>"], pyarrow.binary())
    prompts = pyarrow.Array.from_buffers(pyarrow.string(), 2, values.buffers())
    pyarrow.parquet.write_table(pyarrow.table({"prompt": prompts, "answer": ["1", "2"]}), folder / "rows.parquet")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("no_ray")
def test_an_invalid_job_is_rejected_before_ray_starts(
    name: str, tmp_path: Path, run_trainer: training_runs.RunTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, text = CASES[name]
    (tmp_path / "bad_algorithm.py").write_text(ALGORITHM_MODULE)
    monkeypatch.delitem(sys.modules, "bad_algorithm", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "empty").mkdir()
    write_user_files(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1>", "answer": "1"}\n{"prompt": oops}\n')
    (tmp_path / "verl.jsonl").write_text('{"prompt": "1>", "reward_model": {"style": "", "ground_truth": "1"}}\n')
    (tmp_path / "answers.jsonl").write_text(
        '{"prompt": "1>", "answer": "1"}\n{"prompt": "2>", "answer": "\\\\boxed{}"}\n'
    )
    (tmp_path / "other.jsonl").write_text('{"prompt": "1>", "answer": "1"}\n{"answer": "2"}\n')
    run = run_trainer(job, None)
    assert run.exit_code == 2, run.terminal
    assert "Traceback" not in run.terminal
    state = run.files.state()
    assert state.phase == "Failed"
    assert state.error is not None
    for message in (run.terminal, state.error.message):
        assert re.search(text, message), message


@pytest.mark.usefixtures("no_ray")
def test_a_tracker_without_credentials_is_rejected_before_ray_starts(
    tmp_path: Path, run_trainer: training_runs.RunTrainer
) -> None:
    job = training_runs.small_job(trackers=[{"type": "WandB"}])
    run = run_trainer(job, None, HOME=str(tmp_path), WANDB_API_KEY="")
    assert run.exit_code == 2, run.terminal
    state = run.files.state()
    assert state.error is not None
    for message in (run.terminal, state.error.message):
        assert message == Mentions("spec.training.trackers[0]", "WANDB_API_KEY")


@pytest.mark.usefixtures("no_ray")
def test_tensor_parallelism_with_an_engine_without_it_is_rejected_before_ray_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roles: training_runs.Document = {"rollout": {"tensorParallel": 2}}
    wire = training_runs.small_job(num_workers=2, roles=roles, rollout={"engine": "Auto"})
    job = TrainerJob(name="small", spec=RLJob.from_wire(wire).spec)
    for name, value in {"SPEC": dump_job(job), "RUN_FOLDER": str(tmp_path), "DEVICE": "cpu"}.items():
        monkeypatch.setenv(f"RLJOB_{name}", value)
    kept = AutoSettings(dtype=Dtype.FLOAT32, rollout_engine=RolloutEngine.HUGGING_FACE, rollout_compile=Compile.NEVER)
    with (
        pytest.raises(
            ConfigurationError, match=r"roles\.rollout\.tensorParallel: .* started with it \(seen: 2\); set tens"
        ),
        built_run(job, read_settings(), kept),
    ):
        pass


def test_fused_kernels_are_rejected_on_cpus_before_workers_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeLiger().install(monkeypatch)
    # On a cluster the type of the devices is known only when Ray has started.
    monkeypatch.setattr("rljob_trainer.controller.build_run.connected_ray", lambda *_: nullcontext("cpu"))
    job = TrainerJob(name="small", spec=RLJob.from_wire(training_runs.small_job(model={"kernels": "Liger"})).spec)
    for name, value in {"SPEC": dump_job(job), "RUN_FOLDER": str(tmp_path)}.items():
        monkeypatch.setenv(f"RLJOB_{name}", value)
    with (
        pytest.raises(ConfigurationError, match=r"model\.kernels: Liger needs GPUs \(seen: cpu\); set Plain"),
        built_run(job, read_settings(), None),
    ):
        pass


@pytest.mark.usefixtures("no_ray")
def test_adapters_that_do_not_fit_are_rejected_before_ray_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = TrainerJob(name="small", spec=RLJob.from_wire(training_runs.small_job(model={"lora": {"rank": 4}})).spec)
    for name, value in {"SPEC": dump_job(job), "RUN_FOLDER": str(tmp_path), "DEVICE": "cpu"}.items():
        monkeypatch.setenv(f"RLJOB_{name}", value)
    kept = AutoSettings(
        dtype=Dtype.FLOAT32,
        rollout_engine=RolloutEngine.HUGGING_FACE,
        rollout_compile=Compile.NEVER,
        lora=Lora(rank=8, sync=LoraSync.MERGED),
    )
    with (
        pytest.raises(ConfigurationError, match=r"model\.lora: is rank 4, .* was trained with rank 8, "),
        built_run(job, read_settings(), kept),
    ):
        pass


@pytest.mark.usefixtures("no_ray")
def test_missing_vllm_is_rejected_before_ray_starts(
    run_trainer: training_runs.RunTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "vllm" else real(name, *more))
    run = run_trainer(training_runs.small_job(rollout={"engine": "VLLM"}), None)
    assert run.exit_code == 2, run.terminal
    assert run.terminal == Mentions("spec.training.rollout.engine:", "not installed", "(seen: VLLM)")
    # No start number was recorded: there is no earlier start that a retry would have to be protected from.
    assert not RunFolder(run.files.folder).has_results()


def test_an_unsupported_model_is_rejected_and_leaves_no_processes(
    run_trainer: training_runs.RunTrainer, cluster: str, tmp_path: Path
) -> None:
    """BERT's head has an extra layer before its output weights, which the trainer does not know."""
    sizes = {"vocab_size": 16, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = tiny_models.make_from(
        BertConfig(**sizes, intermediate_size=64, is_decoder=True, eos_token_id=1, bos_token_id=None)
    )
    model.save_pretrained(tmp_path / "bert")
    tiny_models.copy_tokenizer(tmp_path / "bert")
    run = run_trainer(training_runs.small_job(model={"source": "./bert"}), cluster)
    assert run.exit_code == 2, run.terminal
    expected = r"does not support 'bert' models: .* differ .* by up to \d\.\de[+-]\d+, more"
    state = run.files.state()
    assert state.error is not None
    for message in (run.terminal, state.error.message):
        assert re.search(expected, message), message
    assert "Traceback" not in run.terminal
    assert run.files.checkpoint_names() == []
    assert not (run.files.folder / "export").exists()
    with ray_session(cluster, 0, 0):
        assert {group["state"] for group in placement_group_table().values()} <= {"REMOVED"}


def test_a_pool_that_does_not_fit_the_cluster_reports_what_is_missing(
    run_trainer: training_runs.RunTrainer, cluster: str
) -> None:
    run = run_trainer(training_runs.small_job(num_workers=4), cluster)
    assert run.exit_code == 75, run.terminal
    assert re.search(
        r"pool main: needs 1 node with CPU 4 each, .*0 of 1 node .*: \S+ lacks CPU \(4 needed, 3 there\); add",
        run.terminal,
    )
    assert run.files.state().phase == "Failed"


def test_an_unreachable_cluster_is_named(
    run_trainer: training_runs.RunTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_session_module, "CONNECT_SECONDS", 0.6)
    run = run_trainer(training_runs.small_job(), "127.0.0.1:1")
    assert run.exit_code == 75, run.terminal
    assert re.search(r"RAY_ADDRESS: .* 127\.0\.0\.1:1 ", run.terminal)
    assert "Traceback" not in run.terminal


def test_a_code_folder_that_is_too_large_to_upload_is_rejected(
    run_trainer: training_runs.RunTrainer, cluster: str, tmp_path: Path
) -> None:
    with (tmp_path / "model.bin").open("wb") as file:
        file.truncate(600 << 20)
    run = run_trainer(training_runs.small_job(), cluster, RLJOB_SHIPPED_CODE=str(tmp_path))
    assert run.exit_code == 2, run.terminal
    assert run.terminal == Mentions(f"{tmp_path}:", "cannot copy", "cluster", ".gitignore")
    # Ray would use the connection that it had opened before the error.
    with pytest.raises(RaySystemError):
        ray.nodes()


def test_a_home_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        (tmp_path / "home" / ".ray").mkdir()

    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(ResourceError) as error, ray_session(None, 1, 0):
        pass
    assert str(error.value) == Mentions("Ray:", str(tmp_path / "home"), "HOME")


def test_a_temporary_folder_with_a_long_path_is_reported_with_the_variable_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("batch-system-" * 8)
    folder.mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(folder))
    # Else Ray turns authentication on in this process, and later tests could not use their cluster, which has none.
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(ConfigurationError) as error, ray_session(None, 1, 0):
        pass
    assert str(error.value) == Mentions("Ray:", "107", str(folder), "RAY_TMPDIR=/tmp")
