"""`rljob run` with the real trainer: Ctrl-C saves where no save is due; the resumed run leaves no seam, no process."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from rljob_api.constants import ENV_RUN_FOLDER
from rljob_testing.command_line import Workplace

SMALL = """\
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata: {name: small}
spec:
  pools:
  - {name: main, nodes: 1, gpusPerNode: 1}
  training:
    model: {source: package://rljob_trainer/assets/sort_digits/model}
    dataset: {type: File, file: {path: rows.jsonl}, maxPromptTokens: 8}
    rewards: [{type: Function, function: {path: "my_rewards:score"}, numProcesses: 1}]
    rollout: {engine: HuggingFace, groupSize: 4, maxNewTokens: 8}
    steps: 40
    batchSize: 4
  checkpoint: {everySteps: 100, keep: 1}
"""
REWARD = "def score(prompt, response, answer, row):\n    return float(response == answer)\n"


@pytest.fixture
def place(tmp_path: Path) -> Workplace:
    """A job with its own rows and its own reward beside it."""
    rows = [{"prompt": f"{n:05d}>", "answer": "".join(sorted(f"{n:05d}"))} for n in range(10_000, 10_064)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "my_rewards.py").write_text(REWARD)
    (tmp_path / "job.yaml").write_text(SMALL)
    return Workplace(tmp_path)


def steps_logged(place: Workplace) -> list[int]:
    """Of rows of training steps: what a save takes after its step's row stands in one of its own."""
    path = place.run_folder / "metrics.jsonl"
    complete = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
    rows = [json.loads(line) for line in complete]
    return [row["step"] for row in rows if "actor/lr" in row]


def processes_of(place: Workplace) -> list[str]:
    """Command lines of all processes that were started for this run, by their environment."""
    mark = f"{ENV_RUN_FOLDER}={place.run_folder}".encode()
    found = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdecimal() and mark in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


@pytest.mark.ray
@pytest.mark.long
def test_ctrl_c_and_resume(place: Workplace, wait_for: Callable[[Callable[[], bool]], None]) -> None:
    process = place.command("run", "job.yaml", CUDA_VISIBLE_DEVICES="")

    def second_step_is_logged() -> bool:
        assert process.poll() is None, process.communicate()[0]
        return 2 in steps_logged(place)

    wait_for(second_step_is_logged)
    assert len(processes_of(place)) > 1
    os.kill(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    assert "to go on: rljob run job.yaml --resume" in output
    stopped_after = steps_logged(place)[-1]
    assert 2 <= stopped_after < 40
    assert processes_of(place) == []

    process = place.command("run", "job.yaml", "--resume", CUDA_VISIBLE_DEVICES="")
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert f"resumed from step {stopped_after}" in output
    assert steps_logged(place) == list(range(1, 41))
    assert (place.run_folder / "export" / "model.safetensors").exists()
    assert (place.run_folder / "plots" / "overview.png").exists()
    assert processes_of(place) == []
