"""`rljob run` as a process, with a stand-in for the trainer: what it passes on, rejects, stops and leaves behind."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from rljob_api.contract_documents import load_job
from rljob_api.job_file import load_job_file
from rljob_api.v1alpha1.algorithm import LossAggregation
from rljob_api.v1alpha1.policy_loss import Clipped
from rljob_api.v1alpha1.recipes import resolve_algorithm
from rljob_cli.local.run import explain_exit
from rljob_testing.cli.rljob_command import JobFolder
from rljob_testing.messages import Mentions

WaitFor = Callable[[Callable[[], bool]], None]
Rljob = Callable[..., tuple[int, str, str]]


def trainer_environment(workplace: JobFolder, attempt: int) -> dict[str, str]:
    return dict(json.loads((workplace.run_folder / f"environment-{attempt}.json").read_text()))


def num_steps_in(workplace: JobFolder) -> int:
    """Rows of the metrics; the stand-in reports a step before it writes its row."""
    metrics = workplace.run_folder / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


@pytest.fixture
def error_of_run(workplace: JobFolder, rljob: Rljob, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The error that `rljob run` prints, in this process, before it starts the trainer."""
    monkeypatch.chdir(workplace.folder)

    def run(*arguments: str) -> str:
        code, output, errors = rljob("run", "job.yaml", "--code", "code", *arguments)
        assert code == 2
        return output + errors

    return run


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "zombie" not in Path(f"/proc/{pid}/status").read_text()


def test_a_run_passes_the_contract_to_the_trainer_and_reports_folder_and_result(workplace: JobFolder) -> None:
    code, output = workplace.run(RAY_ADDRESS="10.0.0.1:6379", PYTHONPATH="/somewhere", CUDA_VISIBLE_DEVICES="")
    assert code == 0, output
    environment = trainer_environment(workplace, 1)
    job = load_job(environment["RLJOB_SPEC"])
    assert (job.contract_version, job.name) == (1, "small")
    assert '"contractVersion":1' in environment["RLJOB_SPEC"]
    folder = workplace.run_folder
    assert environment["RLJOB_RUN_FOLDER"] == str(folder)
    assert environment["RLJOB_CHECKPOINT_FOLDER"] == str(folder / "checkpoints")
    assert environment["RLJOB_RUN_STATE_FILE"] == str(folder / "rljob-run-state.json")
    assert environment["RLJOB_ATTEMPT"] == "1"
    assert environment["RLJOB_JOB_FOLDER"] == str(workplace.folder)
    assert environment["RLJOB_DEVICE"] == "cpu"
    assert environment["PYTHONPATH"] == f"{workplace.folder}:{workplace.folder / 'code'}:/somewhere"
    assert environment["RAY_ADDRESS"] == "unset"
    assert "CPU core" in output
    assert "actor, rollout" in output
    assert "actor, rollout, ref" not in output
    assert f"results: {workplace.run_folder}" in output
    assert output == Mentions("exit code 0", "complete")
    assert output == Mentions("step 3 of 3", "0.500", "checkpoint at step 3")
    assert output.count("alarm ResponsesCutOff since step 1: 75 % were truncated\n") == 1
    assert "rljob run" not in output
    assert output.splitlines()[-1] == f"page: {folder}/view.html"
    assert "Complete with 1 alarm at step 3 of 3: 75 % were truncated" in (folder / "view.html").read_text()
    written = load_job_file(folder / "job.yaml")
    assert written.spec.training.batch_size == 4
    text = (folder / "job.yaml").read_text()
    assert "clipRatioLow: 0.2" in text
    assert "image:" not in text


def test_a_run_with_changed_values_has_its_own_name_and_folder(workplace: JobFolder) -> None:
    options = ("--name", "other", "--set", "spec.training.batchSize=8")
    code, output = workplace.run(*options)
    assert code == 0, output
    written = load_job_file(workplace.folder / "runs" / "other" / "job.yaml")
    assert (written.metadata.name, written.spec.training.batch_size) == ("other", 8)
    code, output = workplace.run(*options)
    assert (code, output) == (2, Mentions("--resume", "--set spec.training.batchSize=8 --name other"))


def test_a_run_on_a_ray_cluster_leaves_pools_and_devices_to_it(workplace: JobFolder) -> None:
    job = workplace.job_file.read_text().replace("nodes: 1, gpusPerNode: 1", "nodes: 2, gpusPerNode: 4")
    workplace.job_file.write_text(job)
    code, output = workplace.run("--ray", "10.0.0.1:6379", CUDA_VISIBLE_DEVICES="")
    assert code == 0, output
    environment = trainer_environment(workplace, 1)
    assert environment["RAY_ADDRESS"] == "10.0.0.1:6379"
    assert environment["RLJOB_SHIPPED_CODE"] == str(workplace.folder / "code")
    assert "RLJOB_DEVICE" not in environment
    [pool] = load_job(environment["RLJOB_SPEC"]).spec.pools
    assert (pool.nodes, pool.gpus_per_node) == (2, 4)
    assert "Ray cluster" in output
    assert "this machine" not in output


@pytest.mark.parametrize(
    ("named", "expected"),
    [("10.0.0.1:6379", "10.0.0.1:6379"), ("http://10.0.0.1:8265", "auto"), ("", "auto")],
    ids=["address", "dashboard", "none"],
)
def test_auto_is_the_cluster_that_the_environment_names(workplace: JobFolder, named: str, expected: str) -> None:
    code, output = workplace.run("--ray", "auto", RAY_ADDRESS=named)
    assert code == 0, output
    assert trainer_environment(workplace, 1)["RAY_ADDRESS"] == expected


def test_workers_are_not_chosen_for_a_ray_cluster(error_of_run: Callable[..., str]) -> None:
    output = error_of_run("--ray", "auto", "--workers", "2")
    assert output == Mentions("--workers:", "Ray cluster", "pools", "--ray")


def test_the_run_folder_keeps_the_resolved_algorithm(workplace: JobFolder) -> None:
    with workplace.job_file.open("a") as file:
        file.write("    algorithm: {type: DrGRPO, advantage: {groupRelative: {normalizeByStd: true}}}\n")
    assert workplace.run("--workers", "1")[0] == 0
    written = load_job_file(workplace.run_folder / "job.yaml").spec.training.algorithm
    assert written.loss.clipped == Clipped(clip_ratio_low=0.2, clip_ratio_high=0.2, dual_clip_ratio=0)
    assert written.aggregation is LossAggregation.SEQUENCE_MEAN_TOKEN_SUM_NORM
    original = load_job_file(workplace.job_file).spec.training.algorithm
    assert resolve_algorithm(written) == resolve_algorithm(original)


def test_a_job_that_is_too_large_for_the_trainer_is_rejected_before_an_attempt_is_counted(
    workplace: JobFolder, error_of_run: Callable[..., str]
) -> None:
    with workplace.job_file.open("a") as file:
        file.write("  env:\n" + "".join(f"  - {{name: TEXT_{n}, value: {'x' * 4000}}}\n" for n in range(17)))
    assert error_of_run() == Mentions("65536 bytes")
    assert [entry.name for entry in workplace.run_folder.iterdir()] == [".lock"]


def test_an_environment_that_the_system_rejects_is_named_before_an_attempt_is_counted(workplace: JobFolder) -> None:
    # Linux accepts at most 128 KiB in one variable; PYTHONPATH grows by the job's folders.
    code, output = workplace.run(PYTHONPATH="/nowhere:" * 14_560)
    assert code == 2
    assert output == Mentions("error:", "trainer", "environment")
    assert "Traceback" not in output
    assert [entry.name for entry in workplace.run_folder.iterdir()] == [".lock"]


def test_variables_of_the_job_reach_the_trainer_with_their_references_replaced(workplace: JobFolder) -> None:
    with workplace.job_file.open("a") as file:
        file.write("  env: [{name: CODE, value: '75'}, {name: STAND_IN, value: exit-$(CODE)}]\n")
    code, output = workplace.run(mode="finish")
    assert code == 75
    assert output == Mentions("exit code 75", "worker")
    assert output.endswith(": rljob run job.yaml --code code\n")


def test_advice_repeats_the_given_options(workplace: JobFolder, error_of_run: Callable[..., str]) -> None:
    options = ("--run-folder", "my runs/1", "--workers", "1")
    again = "rljob run job.yaml --resume --workers 1 --run-folder 'my runs/1' --code code"
    code, output = workplace.run(*options, mode="lost")
    assert code == 75
    assert output.endswith(f": {again}\n")
    assert error_of_run(*options) == Mentions(f"`{again}`", "--run-folder")
    output = error_of_run("--resume", "--run-folder", "other")
    assert output == Mentions("no run", "`rljob run job.yaml --run-folder other --code code`")


@pytest.mark.parametrize(("mode", "code"), [("exit-1", 1), ("killed", 137)])
def test_the_trainers_exit_code_is_passed_on_and_explained(workplace: JobFolder, mode: str, code: int) -> None:
    seen, output = workplace.run(mode=mode)
    assert seen == code
    assert f"exit code {code}: {explain_exit(code, None, was_killed_on_request=False)}\n" in output


def test_a_trainer_that_exits_with_0_before_the_job_is_complete_has_failed(workplace: JobFolder) -> None:
    code, output = workplace.run(mode="exit-0")
    assert code == 1
    assert output == Mentions("trainer", "code 0", "complete")
    assert "exit code 1: " in output
    assert json.loads((workplace.run_folder / "attempts.jsonl").read_text().splitlines()[-1])["exitCode"] == 1


def test_a_second_run_is_rejected_and_a_resumed_one_counts_on(
    workplace: JobFolder, error_of_run: Callable[..., str]
) -> None:
    assert workplace.run()[0] == 0
    before = (workplace.run_folder / "metrics.jsonl").read_text()
    assert error_of_run() == Mentions("step 3 of 3", "Complete", "`rljob run job.yaml --resume --code code`")
    assert (workplace.run_folder / "metrics.jsonl").read_text() == before
    assert workplace.run("--resume")[0] == 0
    assert trainer_environment(workplace, 2)["RLJOB_ATTEMPT"] == "2"


def test_a_run_that_failed_before_its_first_step_may_be_run_again(workplace: JobFolder) -> None:
    assert workplace.run(mode="exit-2")[0] == 2
    assert workplace.run()[0] == 0
    assert trainer_environment(workplace, 2)["RLJOB_ATTEMPT"] == "2"


def test_a_damaged_list_of_attempts_is_read_as_far_as_possible(workplace: JobFolder) -> None:
    assert workplace.run()[0] == 0
    with (workplace.run_folder / "attempts.jsonl").open("ab") as file:
        file.write(b"\xff\xfe\n")
        file.write(b'{"attempt": -7}\n')
        file.write(b"[" * 100_000 + b"\n")
        file.write(b'{"attempt": 1' + b"0" * 5000 + b"}\n")
    assert workplace.run("--resume")[0] == 0
    assert trainer_environment(workplace, 2)["RLJOB_ATTEMPT"] == "2"


def test_a_missing_code_folder_is_reported(workplace: JobFolder, error_of_run: Callable[..., str]) -> None:
    for wrong in ("cod", "job.yaml"):
        assert error_of_run("--code", wrong) == Mentions("error: --code:", wrong, "not a folder")
    assert not workplace.run_folder.exists()


def test_a_deleted_current_folder_is_reported(
    workplace: JobFolder, rljob: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = workplace.folder / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    code, output, errors = rljob("run", str(workplace.job_file))
    assert (code, output, errors) == (2, "", Mentions("error:", "current folder", "deleted"))


def test_an_empty_address_of_a_ray_cluster_does_not_start_a_local_run(error_of_run: Callable[..., str]) -> None:
    assert error_of_run("--ray", "") == Mentions("error: --ray:", "empty", "HOST:PORT", "remove --ray")


def test_a_run_in_a_bucket_is_not_resumed_without_it(workplace: JobFolder, error_of_run: Callable[..., str]) -> None:
    with (workplace.folder / "job.yaml").open("a") as file:
        file.write("  checkpoint: {storage: {s3: {bucket: team-checkpoints, prefix: rl/run-1}}}\n")
    code, output = workplace.run("--bucket")
    assert code == 0, output
    environment = trainer_environment(workplace, 1)
    assert load_job(environment["RLJOB_SPEC"]).spec.checkpoint.storage is not None
    # The trainer takes the number after that of the newest start in the bucket.
    assert "RLJOB_START_NUMBER" not in environment
    assert error_of_run("--resume") == Mentions("the checkpoints of this run are in s3://team-checkpoints/rl/run-1")
    assert error_of_run("--bucket") == Mentions("`rljob run job.yaml --resume --bucket --code code`")


def test_resume_without_a_run_is_rejected(workplace: JobFolder, error_of_run: Callable[..., str]) -> None:
    output = error_of_run("--resume")
    assert output == Mentions(f"{workplace.run_folder}:", "no run", "`rljob run job.yaml --code code`")


def test_resume_is_rejected_if_the_job_says_never(workplace: JobFolder, error_of_run: Callable[..., str]) -> None:
    with workplace.job_file.open("a") as file:
        file.write("  checkpoint: {resume: Never}\n")
    assert error_of_run("--resume") == Mentions("spec.checkpoint.resume:", "Never")


def test_a_foreign_folder_is_not_changed(workplace: JobFolder, error_of_run: Callable[..., str]) -> None:
    folder = workplace.folder / "mine"
    folder.mkdir()
    (folder / "thesis.txt").write_text("x")
    output = error_of_run("--run-folder", "mine")
    assert output == Mentions(str(folder), "empty", "thesis.txt")
    assert sorted(entry.name for entry in folder.iterdir()) == [".lock", "thesis.txt"]


def test_two_runs_cannot_use_one_folder_at_once(
    workplace: JobFolder, wait_for: WaitFor, error_of_run: Callable[..., str]
) -> None:
    first = workplace.start(mode="wait")
    wait_for((workplace.run_folder / "metrics.jsonl").exists)
    assert error_of_run("--resume") == Mentions("another run", f"process {first.pid}")
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=120)


def test_ctrl_c_saves_a_checkpoint_and_says_how_to_resume(workplace: JobFolder, wait_for: WaitFor) -> None:
    process = workplace.start(mode="wait")
    wait_for((workplace.run_folder / "metrics.jsonl").exists)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130
    assert (
        "stopping: the trainer ends its step and saves a checkpoint; press Ctrl-C again to kill it immediately"
        in output
    )
    assert "exit code 130: stopped on request after a checkpoint" in output
    assert "to continue: rljob run job.yaml --resume" in output
    assert workplace.run("--resume")[0] == 0
    rows = [json.loads(line)["step"] for line in (workplace.run_folder / "metrics.jsonl").read_text().splitlines()]
    assert rows == [1, 2, 3]


def test_ctrl_c_before_the_first_step_claims_no_checkpoint(workplace: JobFolder, wait_for: WaitFor) -> None:
    process = workplace.start(mode="starting")
    wait_for((workplace.run_folder / "rljob-run-state.json").exists)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "stopping: the training has not started" in output
    assert "ends its step" not in output
    assert "exit code 130: stopped on request; this attempt completed no step, so nothing is lost\n" in output
    assert "to continue: rljob run job.yaml --code code\n" in output


def test_ctrl_c_during_a_resumed_run_reports_the_kept_checkpoints(workplace: JobFolder, wait_for: WaitFor) -> None:
    assert workplace.run()[0] == 0
    process = workplace.start("--resume", mode="starting")
    wait_for(lambda: '"attempt":2' in (workplace.run_folder / "rljob-run-state.json").read_text())
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert output == Mentions("exit code 130", "completed no step")
    assert output == Mentions("step 3 of 3", "0.500", "checkpoint at step 3", str(workplace.run_folder))
    assert ": rljob run job.yaml --resume --code code\n" in output


@pytest.mark.parametrize(
    ("mode", "step", "lost"),
    [
        ("deaf", 1, ("no checkpoint", "1 completed", "lost")),
        ("deaf-later", 2, ("after the checkpoint of step 1", "lost")),
    ],
)
def test_a_second_ctrl_c_stops_immediately_and_reports_the_lost_steps(
    workplace: JobFolder, wait_for: WaitFor, mode: str, step: int, lost: tuple[str, ...]
) -> None:
    process = workplace.start(mode=mode)
    wait_for(lambda: num_steps_in(workplace) == step)
    trainer = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    while "Ctrl-C again" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 137
    assert output == Mentions("immediately", "exit code 137", "second request", *lost, without=["memory"])
    assert not alive(trainer)


def test_a_process_that_the_trainer_left_behind_is_ended(workplace: JobFolder) -> None:
    code, _ = workplace.run(mode="orphan")
    assert code == 0
    assert not alive(int((workplace.run_folder / "orphan.pid").read_text()))


def test_the_trainer_is_asked_to_stop_when_the_command_is_killed(workplace: JobFolder, wait_for: WaitFor) -> None:
    process = workplace.start(mode="wait")
    wait_for((workplace.run_folder / "metrics.jsonl").exists)
    trainer = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])
    process.kill()
    process.communicate(timeout=120)
    wait_for(lambda: not alive(trainer))
    assert [folder.name for folder in (workplace.run_folder / "checkpoints").iterdir()] == ["step-1"]
    assert workplace.run("--resume")[0] == 0


def test_an_invalid_file_is_rejected_before_anything_is_created(
    workplace: JobFolder, error_of_run: Callable[..., str]
) -> None:
    workplace.job_file.write_text(workplace.job_file.read_text().replace("steps: 3", "stepz: 3"))
    output = error_of_run()
    assert output == Mentions("job.yaml", "stepz")
    assert not (workplace.folder / "runs").exists()


@pytest.mark.parametrize("name", ["random.py", "numbers/__init__.py", "code/types.py", "queue.py", "sched.py"])
def test_a_file_that_hides_a_module_of_python_is_rejected_before_anything_is_created(
    workplace: JobFolder, error_of_run: Callable[..., str], name: str
) -> None:
    file = workplace.folder / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("")
    for unused in ("antigravity.py", "this.py"):
        (workplace.folder / unused).write_text("")
    output = error_of_run()
    module = name.removeprefix("code/").removesuffix(".py").removesuffix("/__init__")
    assert output == Mentions(f"error: {file}:", "Python", repr(module), "rename", f"my_{module}")
    assert not workplace.run_folder.exists()


def test_a_missing_trainer_package_is_reported(
    workplace: JobFolder, error_of_run: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rljob_cli.local.run.find_spec", lambda _: None)
    assert error_of_run() == Mentions("trainer", "not installed")
    assert not (workplace.folder / "runs").exists()
