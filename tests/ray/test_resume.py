"""A run that is stopped, loses a worker and is resumed after each ends bit for bit like the uninterrupted run."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from pydantic import JsonValue
from transformers import AutoModelForCausalLM, AutoTokenizer

from rljob_api.job_file import load_job_file
from rljob_api.run_state import RunState
from rljob_api.v1alpha1.model import Dtype
from rljob_testing.messages import Mentions
from rljob_testing.training import training_runs
from rljob_testing.training.tracker_files import mlflow_runs, wandb_files
from rljob_trainer.stack_traces import take_stacks, traced_processes

pytestmark = [pytest.mark.ray, pytest.mark.long]

NUM_STEPS = 8
ADAPTIVE = {"type": "Adaptive", "adaptive": {"target": 1.0, "horizon": 10000}}
SECONDS_INTO_STEP = 0.2
"""After the end of a step: the next one is running."""
SECONDS_TO_END = 30.0
WHERE = {"RLJOB_POD_NAME": "small-1-main-0", "RLJOB_NODE_NAME": "node-7"}
WORKER = "reward+actor+ref+rollout+hybrid"
"""The name of the workers' processes."""
REWARD = "def score(prompt, response, answer, row):\n    return float(response == answer)\n"


TRACKERS: training_runs.Document = {"trackers": [{"type": "WandB", "wandb": {"mode": "Offline"}}, {"type": "MLflow"}]}
"""Of the run that is interrupted; the uninterrupted run has none."""


def job(folder: Path, *, every_steps: int = 1, **training: JsonValue) -> training_runs.Document:
    """A job with two workers, so that shards are merged on resume; its steps (512 responses) take long enough to be
    stopped in. Its dataset and its reward are in the same folder."""
    numbers = [f"{10_000 + 37 * number}" for number in range(32 * NUM_STEPS)]
    rows = [{"prompt": f"{number}>", "answer": "".join(sorted(number))} for number in numbers]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "my_rewards.py").write_text(REWARD)
    return training_runs.small_job(
        num_workers=2,
        checkpoint={"everySteps": every_steps},
        dataset={"file": {"path": "rows.jsonl"}},
        rewards=[training_runs.function_reward("my_rewards:score")],
        batchSize=32,
        rollout={"groupSize": 16},
        optimizer={"warmupSteps": 3},
        algorithm={"kl": {"coefficient": 0.01, "controller": ADAPTIVE}},
        evaluations=[training_runs.held_out(num_prompts=24, every_steps=NUM_STEPS)],
        steps=NUM_STEPS,
        **training,
    )


@pytest.fixture(scope="module")
def uninterrupted(cluster: str, tmp_path_factory: pytest.TempPathFactory) -> training_runs.Ended:
    """A run of all steps without interruption."""
    folder = tmp_path_factory.mktemp("whole")
    run = training_runs.RunTrainer(folder)(job(folder), cluster)
    assert run.exit_code == 0, run.terminal
    return run


@dataclass(frozen=True)
class Stopped:
    """A run that was stopped by Ctrl-C."""

    run: training_runs.LocalRun
    after_step: int
    checkpoints: list[str]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    """Sends Ctrl-C in the second step (on a machine that stalls it may be another one), after which no save is due."""
    folder = tmp_path_factory.mktemp("interrupted")
    run = training_runs.LocalRun(folder, job(folder, every_steps=100, **TRACKERS))
    run.wait_for(lambda: run.files.training_steps() != [])
    time.sleep(SECONDS_INTO_STEP)
    assert len(run.processes_of_run()) > 5
    run.process.send_signal(signal.SIGINT)
    run.end()
    return Stopped(run, run.files.state().progress.step, run.files.checkpoint_names())


@dataclass(frozen=True)
class Killed:
    """A run that was resumed after the stop and lost a worker after a checkpoint."""

    run: training_runs.LocalRun
    victim: int
    """Its process id."""
    seconds_to_end: float
    state: RunState
    steps: list[int]
    """The steps that had been done then."""
    newest: str
    """The newest of its complete checkpoints."""

    @property
    def newest_step(self) -> int:
        """The step of the newest checkpoint."""
        return int(self.newest.removeprefix("step-").partition(".")[0])


@pytest.fixture(scope="module")
def killed(stopped: Stopped) -> Killed:
    folder = stopped.run.files.folder.parents[1]
    run = training_runs.LocalRun(folder, job(folder, **TRACKERS), "--resume", **WHERE)
    run.wait_for(lambda: run.files.state().attempt == 2 and run.files.newest_checkpoint() > stopped.after_step)
    time.sleep(SECONDS_INTO_STEP)
    # Not a process that a worker has started.
    victim = min(each.process_id for each in traced_processes(run.files.folder) if each.role == WORKER)
    os.kill(victim, signal.SIGKILL)
    killed_at = time.monotonic()
    run.end()
    seconds = time.monotonic() - killed_at
    complete = sorted(path.parent.name for path in run.files.checkpoints.glob("step-*/manifest.json"))
    return Killed(run, victim, seconds, run.files.state(), run.files.training_steps(), complete[-1])


@dataclass(frozen=True)
class Finished:
    """The run that was resumed after that and completed."""

    run: training_runs.LocalRun
    roles: Counter[str]
    """How often processes of each role have written their stacks."""


@pytest.fixture(scope="module")
def finished(killed: Killed) -> Finished:
    """While it runs, all its processes are asked for their stacks again and again, which must change nothing."""
    folder = killed.run.files.folder.parents[1]
    run = training_runs.LocalRun(folder, job(folder, **TRACKERS), "--resume")
    roles: Counter[str] = Counter()
    while run.process.poll() is None:
        stacks = take_stacks(traced_processes(run.files.folder), 5)
        roles.update(each.role for each in stacks if each.text)
        # Pauses, so that the run makes progress, too.
        time.sleep(0.2)
    run.end()
    return Finished(run, roles)


def test_ctrl_c_finishes_the_step_saves_and_prints_how_to_resume(stopped: Stopped) -> None:
    run = stopped.run
    assert run.process.returncode == 130, run.output
    assert run.output == Mentions("stopping:", "saves")
    assert 1 <= stopped.after_step < NUM_STEPS
    assert run.output == Mentions(f"stopped as requested after step {stopped.after_step}", "checkpoint")
    assert run.output.endswith(": rljob run job.yaml --resume\n")
    assert stopped.checkpoints == [f"step-{stopped.after_step:08d}.start-0001"]
    assert run.leftover_processes() == []


def test_the_resumed_run_continues_where_the_first_stopped(stopped: Stopped, killed: Killed) -> None:
    assert f"resumed from step {stopped.after_step} ({stopped.checkpoints[-1]})" in killed.run.output
    assert killed.steps == list(range(1, len(killed.steps) + 1))


def test_the_error_names_the_rank_and_the_cause(killed: Killed) -> None:
    run = killed.run
    assert run.process.returncode == 75, run.output
    errors = [line for line in run.output.splitlines() if " ERROR " in line]
    assert len(errors) == 1, run.output
    expected = (
        rf"worker rank [01] \(reward, actor, ref, rollout, hybrid; process {killed.victim}"
        r" on pod small-1-main-0, node node-7\) died( in \S+)?: .*not out of memory.*kill -9.*worker-[01]\.log"
    )
    assert re.search(expected, errors[0]), errors[0]
    assert "Traceback" not in run.output
    assert run.output == Mentions("exit code 75:", "worker")


def test_a_lost_worker_ends_the_run_soon_and_leaves_no_process(killed: Killed) -> None:
    assert killed.seconds_to_end < SECONDS_TO_END
    assert len(killed.run.seen) > 5
    assert killed.run.leftover_processes() == []


def test_the_run_state_reports_the_same_error(killed: Killed) -> None:
    state = killed.state
    assert state.phase == "Failed"
    assert state.error is not None
    assert state.error.kind == "WorkerDiedError"
    assert f"process {killed.victim} on pod small-1-main-0, node node-7)" in state.error.message


def test_the_next_run_resumes_from_the_newest_checkpoint(killed: Killed, finished: Finished) -> None:
    # A checkpoint is written while the next step is trained and is complete before that step's own save begins. If the
    # worker dies after that step and before the next save starts, two steps are lost.
    assert killed.newest_step in [killed.steps[-1] - lost for lost in (0, 1, 2)]
    run = finished.run
    assert run.process.returncode == 0, run.output
    assert f"resumed from step {killed.newest_step} ({killed.newest})" in run.output
    state = run.files.state()
    assert (state.phase, state.attempt, state.resumed_from_step) == ("Complete", 3, killed.newest_step)
    assert run.files.training_steps() == list(range(1, NUM_STEPS + 1))
    # Incomplete checkpoints of the lost attempt were removed.
    assert all((path / "manifest.json").exists() for path in run.files.checkpoints.glob("step-*"))
    assert (run.files.folder / "plots" / "overview.png").exists()
    assert run.leftover_processes() == []


def test_wandb_has_one_run_with_one_folder_per_attempt(stopped: Stopped, killed: Killed, finished: Finished) -> None:
    files = wandb_files(finished.run.files.folder)
    # The first attempt was stopped in its second step; its process may not have begun by then.
    assert len(files) in (2, 3)
    assert len({file.run_id for file in files}) == 1
    assert [file.exit_code for file in files] == [130, 75, 0][-len(files) :]
    # A page for each attempt that was not stopped.
    pages = [sum("page/path" in row for row in file.rows.values()) for file in files]
    assert pages == [0, 1, 1][-len(files) :]
    lost, last = files[-2:]
    trained = [step for step, row in lost.rows.items() if "actor/lr" in row]
    assert trained == [step for step in killed.steps if step > stopped.after_step]
    expected: dict[int, dict[str, float]] = {}
    for row in finished.run.files.metrics():
        if row["step"] > killed.newest_step:
            names = row.keys() - {"step", "wall_time"}
            expected.setdefault(int(row["step"]), {}).update({name: row[name] for name in names})
    for step, values in expected.items():
        assert values.items() <= last.rows[step].items()


def test_mlflow_has_one_run_with_one_value_per_step(
    finished: Finished, uninterrupted: training_runs.Ended, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    [run] = mlflow_runs(finished.run.files.folder)
    assert (run.status, run.tags["rljob.attempt"]) == ("FINISHED", "3")
    # Also the steps of the lost attempt that were repeated, because the repeated steps have the same results.
    values = uninterrupted.files.series("critic/rewards/mean")
    assert run.values["critic/rewards/mean"] == list(enumerate(values, start=1))
    assert {f"samples/heldout/step-{NUM_STEPS:06d}.json", "view.html"} <= run.files.keys()


def test_all_processes_write_their_stacks(finished: Finished) -> None:
    """Stacks of two workers and one scorer, within the seconds that a few steps take."""
    assert finished.roles["controller"] >= 10, finished.roles
    assert min(finished.roles[WORKER], finished.roles["scorer"]) >= 3, finished.roles


def test_the_resolved_auto_values_are_stored(
    uninterrupted: training_runs.Ended, finished: Finished, tmp_path: Path
) -> None:
    """The job leaves the precision open."""
    assert "dtype" not in json.dumps(job(tmp_path))
    for run in (uninterrupted, finished.run):
        resolved = load_job_file(run.files.folder / "resolved.yaml")
        assert resolved.spec.training.model.dtype is Dtype.FLOAT32


def test_both_runs_draw_the_same_prompts_and_generate_the_same_responses(
    uninterrupted: training_runs.Ended, finished: Finished
) -> None:
    for step in range(1, NUM_STEPS + 1):
        expected = uninterrupted.files.samples("train", step)
        # The first group.
        assert len(expected) == 16
        assert finished.run.files.samples("train", step) == expected
    # A data cursor that starts again would repeat the first step's prompts.
    first, third = ({row["prompt"] for row in uninterrupted.files.samples("train", step)} for step in (1, 3))
    assert not first & third


def test_both_runs_report_the_same_metrics(uninterrupted: training_runs.Ended, finished: Finished) -> None:
    names = ("critic/rewards/mean", "actor/pg_loss", "actor/grad_norm", "actor/lr", "eval/heldout/greedy")
    for name in (*names, "actor/kl_coefficient"):
        expected = uninterrupted.files.series(name)
        assert expected, name
        assert finished.run.files.series(name) == expected
    assert len(set(uninterrupted.files.series("actor/kl_coefficient"))) == NUM_STEPS
    assert uninterrupted.files.state().alarms is not None
    assert finished.run.files.state().alarms == uninterrupted.files.state().alarms


def test_both_runs_record_the_same_tokens_of_the_last_step_and_evaluation(
    uninterrupted: training_runs.Ended, finished: Finished
) -> None:
    for name, num_conversations in (("training", 16), ("evaluation", 32)):
        expected = uninterrupted.files.tokens(name)
        assert (expected["step"], len(expected["conversations"])) == (NUM_STEPS, num_conversations)
        assert finished.run.files.tokens(name) == expected


def test_the_time_of_every_save_is_reported_with_its_step(uninterrupted: training_runs.Ended) -> None:
    assert [row["step"] for row in uninterrupted.files.metrics() if "timing_s/save" in row] == list(
        range(1, NUM_STEPS + 1)
    )


def test_the_final_weights_are_bitwise_equal(uninterrupted: training_runs.Ended, finished: Finished) -> None:
    assert finished.run.files.exported_weights() == uninterrupted.files.exported_weights()


def test_the_exported_model_responds_as_in_the_last_evaluation(uninterrupted: training_runs.Ended) -> None:
    expected = uninterrupted.files.samples("eval_greedy", NUM_STEPS)
    assert len(expected) == 24
    folder = uninterrupted.files.folder / "export"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    answers = []
    for row in expected:
        prompt = torch.tensor([tokenizer.encode(row["prompt"])])
        tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False)
        answers.append(tokenizer.decode(tokens[0, prompt.shape[1] :], skip_special_tokens=True))
    assert answers == [row["response"] for row in expected]


def test_a_damaged_newest_checkpoint_is_skipped(
    uninterrupted: training_runs.Ended, run_trainer: training_runs.RunTrainer, cluster: str
) -> None:
    shutil.copytree(uninterrupted.files.folder, run_trainer.files.folder)
    before, newest = (f"step-{step:08d}.start-0001" for step in (NUM_STEPS - 1, NUM_STEPS))
    flip_a_byte(run_trainer.files.checkpoints / newest / "rank-00001.safetensors")
    run = run_trainer(job(run_trainer.folder), cluster, attempt=2)
    assert run.exit_code == 0, run.terminal
    assert f"skipped damaged checkpoint {newest}: rank-00001.safetensors" in run.terminal
    assert f"resumed from step {NUM_STEPS - 1} ({before})" in run.terminal
    assert run.files.training_steps() == list(range(1, NUM_STEPS + 1))
    # The last step is repeated with the same result.
    assert run.files.exported_weights() == uninterrupted.files.exported_weights()
    assert run.files.checkpoint_names()[1:] == [before, newest.replace("start-0001", "start-0002")]
    assert len(run.files.checkpoint_names()) == 3


def flip_a_byte(path: Path) -> None:
    before = hashlib.sha256(path.read_bytes()).digest()
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    assert hashlib.sha256(path.read_bytes()).digest() != before
