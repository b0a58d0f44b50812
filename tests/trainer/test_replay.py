"""`tools/replay.py` finds the first difference between two runs, and none between equal runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import replay
from replay import Allowed, differences, read_results

Metrics = dict[str, float]
WEIGHT = "checkpoint rank-00000 model.weight"


def run_folder(
    folder: Path, loss: float = 0.5, weight: float = 1.0, cursor: int = 64, **metrics: float
) -> replay.Results:
    """Two steps, each with a metric, and a checkpoint after the second."""
    checkpoint = folder / "checkpoints" / "step-00000002.start-0001"
    checkpoint.mkdir(parents=True)
    records = [{"step": 1, "wall_time": 5.0, "actor/pg_loss": 0.25}, {"step": 2, "actor/pg_loss": loss, **metrics}]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    manifest = {"content": {"step": 2, "extra": {"cursor": {"ordinal": cursor}}}}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    tensors = {"model.weight": torch.tensor([0.5, weight, float("nan")]), "model.bias": torch.zeros(0)}
    save_file(tensors, checkpoint / "rank-00000.safetensors")
    return read_results(folder)


def compared(tmp_path: Path, **changed: float) -> list[str]:
    base = run_folder(tmp_path / "base")
    return [str(each) for each in differences(base, run_folder(tmp_path / "head", **changed), Allowed())]


def test_equal_runs_have_no_difference(tmp_path: Path) -> None:
    assert compared(tmp_path, **{"timing_s/step": 2.0, "perf/throughput": 3.0, "memory/x": 1.0, "wall_time": 9.0}) == []


def test_the_first_difference_is_reported_first(tmp_path: Path) -> None:
    found = compared(tmp_path, loss=0.75, weight=1.5, cursor=128)
    assert found == [
        "step 2: actor/pg_loss: 0.5 in BASE, 0.75 in HEAD, by 0.25",
        'step 2: checkpoint state cursor: {"ordinal": 64} in BASE, {"ordinal": 128} in HEAD',
        f"step 2: {WEIGHT}: 1 of 3 numbers differ, by at most 0.5",
    ]


def test_one_bit_of_one_number_is_a_difference() -> None:
    # The sign of zero: equal as numbers.
    base = replay.Results({1: {WEIGHT: torch.tensor([0.0])}})
    head = replay.Results({1: {WEIGHT: torch.tensor([-0.0])}})
    assert len(differences(base, head, Allowed())) == 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (torch.zeros(2), torch.zeros(3)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16)),
        (torch.zeros(2), 0.0),
        (0.0, None),
        (None, torch.zeros(2)),
    ],
)
def test_another_type_of_value_is_a_difference(old: replay.Value | None, new: replay.Value | None) -> None:
    base, head = (replay.Results({1: {} if each is None else {"x": each}}) for each in (old, new))
    assert len(differences(base, head, Allowed())) == 1


def test_a_name_in_one_tree_only_is_a_difference_unless_it_is_listed(tmp_path: Path) -> None:
    base = run_folder(tmp_path / "base", **{"actor/old": 1.0})
    head = run_folder(tmp_path / "head", **{"actor/new": 1.0})
    found = [str(each) for each in differences(base, head, Allowed())]
    assert found == ["step 2: actor/old: only in BASE", "step 2: actor/new: only in HEAD"]
    assert differences(base, head, Allowed(renamed={"actor/old": "actor/new"})) == []
    assert differences(base, head, Allowed(ignored=["actor/*"])) == []
    assert len(differences(base, head, Allowed(ignored=["actor/old"]))) == 1


def test_missing_steps_are_differences(tmp_path: Path) -> None:
    base = run_folder(tmp_path / "base")
    assert len(differences(base, replay.Results({1: base.steps[1]}), Allowed())) == len(base.steps[2])


def test_a_run_without_a_checkpoint_cannot_be_compared(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(replay.ReplayError, match="no checkpoint"):
        read_results(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-revision", "HEAD"], "neither a folder nor a git revision"),
        (["{folder}", "{folder}"], "imported"),
        (["HEAD", "HEAD", "--keep", "{folder}/file"], "Not a directory"),
    ],
)
def test_wrong_usage_exits_with_2(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The folder has no sources, so the installed code would run instead.
    (tmp_path / "file").write_text("mine")
    assert replay.main([each.format(folder=tmp_path) for each in arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workers", "0"], "--workers: must be at least 1 (seen: 0)"),
        (["--renamed", "old"], "write OLD=NEW (seen: old)"),
        (["--job", "a/job.yaml", "b/job.yaml"], "same name (seen: job)"),
        (["--jobs", "ppo", "--job", "mine/ppo.yaml"], "same name (seen: ppo)"),
    ],
)
def test_wrong_options_are_rejected(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        replay.main(["HEAD", "HEAD", *arguments])
    assert message in capsys.readouterr().err


def test_the_jobs_are_shortened_examples() -> None:
    examples = Path(replay.__file__).parents[1] / "examples"
    jobs = {name: json.loads(replay.short_job(name, examples))["spec"] for name in replay.EXAMPLES}
    kinds = [job["training"]["algorithm"]["type"] for job in jobs.values()]
    assert kinds == ["GRPO", "PPO", "GRPO", "DAPO"]
    assert ["lora" in job["training"]["model"] for job in jobs.values()] == [False, False, True, False]
    assert ["kl" in job["training"]["algorithm"] for job in jobs.values()] == [False, False, True, False]
    assert {(job["training"]["steps"], job["checkpoint"]["everySteps"]) for job in jobs.values()} == {(6, 3)}
