"""The start of the trainer's program where the machine or the job's folder is unusual."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rljob_api.contract_documents import TrainerJob, dump_job
from rljob_api.v1alpha1.job import RLJob
from rljob_testing.jobs.valid_job import valid_job
from rljob_testing.messages import Mentions
from rljob_testing.settings import inherited_environment


@pytest.mark.parametrize(
    ("name", "hidden"), [("torch", "the installed package 'torch'"), ("queue", "Python's own module 'queue'")]
)
def test_a_file_that_hides_a_module_of_the_trainer_is_a_configuration_error(
    tmp_path: Path, name: str, hidden: str
) -> None:
    (tmp_path / "train.jsonl").touch()
    (tmp_path / f"{name}.py").write_text("def score(prompt, response, answer, row):\n    return 1\n")
    job = TrainerJob(name="small", spec=RLJob.from_wire(valid_job()).spec)
    state = tmp_path / "state.json"
    environment = inherited_environment()
    environment |= {
        "RLJOB_SPEC": dump_job(job),
        "RLJOB_RUN_FOLDER": str(tmp_path / "run"),
        "RLJOB_RUN_STATE_FILE": str(state),
        "PYTHONPATH": f"{tmp_path}:{environment.get('PYTHONPATH', '')}",
    }
    done = subprocess.run(
        [sys.executable, "-m", "rljob_trainer"], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2, done.stderr
    problem = f"{tmp_path}/{name}.py: hides {hidden}, which the trainer needs; rename the file"
    assert problem in done.stderr
    assert "please report it" not in done.stderr
    assert json.loads(state.read_text())["error"]["message"].startswith(problem)


def test_standard_output_accepts_all_characters() -> None:
    program = "import sys\nfrom rljob_trainer.__main__ import main\ncode = main()\nprint('中')\nsys.exit(code)\n"
    environment = {name: value for name, value in inherited_environment().items() if name != "RLJOB_SPEC"}
    environment["PYTHONIOENCODING"] = "ascii"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "\\u4e2d\n")


@pytest.mark.parametrize("step", [None, 3])
def test_the_first_run_state_does_not_wait_for_the_storage_of_checkpoints(tmp_path: Path, step: int | None) -> None:
    """The storage hangs, until Ctrl-C or until it responds with a checkpoint."""
    state = tmp_path / "local/state.json"
    found = None
    if step is not None:
        found = f"CheckpointStatus(step={step}, uri='file:///c', digest='d', saved_at='2026-01-31T12:00:00Z')"
    program = f"""
import sys
import rljob_trainer.__main__ as trainer
from rljob_api.v1alpha1.status import CheckpointStatus
def slow_search(*_):
    print(open({str(state)!r}).read())
    if {found} is None:
        raise KeyboardInterrupt
    trainer.refuse_missing = interrupt
    return {found}
def interrupt(*_, **__):
    raise KeyboardInterrupt
trainer.newest_of_job = slow_search
sys.exit(trainer.main())
"""
    environment = inherited_environment() | {
        "RLJOB_SPEC": dump_job(TrainerJob(name="small", spec=RLJob.from_wire(valid_job()).spec)),
        "RLJOB_RUN_FOLDER": str(tmp_path / "run"),
        "RLJOB_RUN_STATE_FILE": str(state),
    }
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 130, done.stderr
    first, last = json.loads(done.stdout), json.loads(state.read_text())
    assert (first["phase"], first["progress"]["step"]) == ("Starting", 0)
    assert "checkpoint" in first["activity"]
    assert last["phase"] == "Stopped"
    assert last.get("resumedFromStep") == step
    assert last["progress"]["step"] == (step or 0)


GAMES = {
    "type": "Class",
    "classes": [{"path": "my_games:Guess"}, {"name": "hard", "path": "my_game:Guess"}],
    "maxContextTokens": 256,
}
FILE = {"type": "File", "file": {"path": "rows.jsonl"}}


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"dataset": FILE}, Mentions("spec.training.dataset.file.path", "rows.jsonl")),
        (
            {"evaluations": [{"dataset": FILE}]},
            Mentions("spec.training.evaluations[0].dataset.file.path", "rows.jsonl"),
        ),
        (
            {"dataset": {"type": "HuggingFace", "huggingFace": {"path": "./no_folder"}}},
            Mentions("spec.training.dataset.huggingFace.path", "./no_folder"),
        ),
        ({"model": {"source": "./no_folder"}}, Mentions("spec.training.model.source", "./no_folder")),
        (
            {"profile": {"steps": [1], "type": "Nsys"}},
            Mentions("spec.training.profile.type", "nsys", "PATH", "Nsys", "Torch"),
        ),
        (
            {"rewards": [{"type": "Function", "function": {"path": "my_reward:score"}}]},
            Mentions("spec.training.rewards[0].function.path", "my_reward", "did you mean my_rewards", "my_rewards.py"),
        ),
        (
            {"rewards": [{"type": "Function", "function": {"path": "mine.reward:score"}}]},
            Mentions("spec.training.rewards[0].function.path", "mine.reward", "did you mean mine.rewards"),
        ),
        (
            {"environment": GAMES, "rewards": []},
            Mentions("spec.training.environment.classes[1].path (hard)", "my_game", "did you mean my_games"),
        ),
        (
            {"algorithm": {"type": "GRPO", "loss": {"type": "Function", "function": {"path": "my_loss:f"}}}},
            Mentions("spec.training.algorithm.loss.function.path", "my_loss", "PYTHONPATH"),
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_is_missing_is_found_before_torch_is_loaded(
    tmp_path: Path, more: dict[str, object], problem: Mentions
) -> None:
    (tmp_path / "train.jsonl").touch()
    (tmp_path / "my_games.py").write_text("raise RuntimeError('is not imported')\n")
    (tmp_path / "my_rewards.py").write_text("raise RuntimeError('is not imported')\n")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/rewards.py").touch()
    whole = valid_job()
    training = whole["spec"]["training"]
    whole["spec"]["training"] = {**training, **more}
    program = """
import sys
from rljob_trainer.__main__ import main
code = main()
assert "torch" not in sys.modules
sys.exit(code)
"""
    environment = inherited_environment()
    environment |= {
        "RLJOB_SPEC": dump_job(TrainerJob(name="small", spec=RLJob.from_wire(whole).spec)),
        "RLJOB_RUN_FOLDER": str(tmp_path / "run"),
        "RLJOB_JOB_FOLDER": str(tmp_path),
        "PATH": "",
        "PYTHONPATH": f"{tmp_path}:{environment.get('PYTHONPATH', '')}",
    }
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert done.stderr == problem
