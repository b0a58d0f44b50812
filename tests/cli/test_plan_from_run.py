"""`rljob plan --from-run` compares a run with its plan; `--calibrate` writes a profile."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from rljob_cli.errors import CliError
from rljob_cli.plan.from_run import run_report
from rljob_cli.plan.options import PlanOptions
from rljob_cli.plan.profile import Profile, constants_for, read_profile, write_profile
from rljob_planner.constants import Constants
from rljob_testing.messages import Mentions

Rljob = Callable[..., tuple[int, str, str]]
REPOSITORY = Path(__file__).parents[2]
JOB = """\
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata: {name: demo}
spec:
  pools: [{name: main, nodes: 1, gpusPerNode: 1}]
  training:
    model: {source: ./model, dtype: Float32}
    dataset: {type: File, file: {path: rows.jsonl}, maxPromptTokens: 8}
    rewards: [{type: Function, function: {path: "score:score"}}]
    rollout: {groupSize: 16, maxNewTokens: 8, maxNumSequences: 512, engine: VLLM, compile: Never}
    steps: 5
    batchSize: 32
"""
MODEL_CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "tie_word_embeddings": True,
}
MEBIBYTE = 2**20


def step_row(step: int, seconds: float = 0.3, **others: float) -> dict[str, float]:
    """A line of metrics.jsonl. Generation takes 0.6 of the seconds, the update 0.3."""
    return {
        "step": step,
        "wall_time": 1_700_000_000.0 + step,
        "prompt_length/mean": 6.0,
        "response_length/mean": 6.0,
        "response_length/max": 8.0,
        "response_length/clip_ratio": 0.01,
        "actor/trained_fraction": 0.9,
        "perf/micro_batch_imbalance": 1.0,
        "timing_s/step": seconds,
        "timing_s/rollout": 0.62 * seconds,
        "timing_s/weight_sync": 0.02 * seconds,
        "timing_s/generate": 0.6 * seconds,
        "timing_s/reward": 0.03 * seconds,
        "timing_s/update_actor": 0.3 * seconds,
        "memory/parameters_bytes_max": 0.5 * MEBIBYTE,
        "memory/kv_cache_bytes_max": 1024.0 * MEBIBYTE,
        "memory/during_generate_bytes_max": 1026.0 * MEBIBYTE,
        "memory/process_bytes_max": 1300.0 * MEBIBYTE,
        **others,
    }


def write_run(folder: Path, rows: Sequence[dict[str, float]] | None = None, job: str = JOB) -> Path:
    """Writes the folder of a run, `runs/NAME` beside the job's model: job and metrics."""
    model = folder.parents[1] / "model"
    model.mkdir()
    folder.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(MODEL_CONFIG))
    (folder / "job.yaml").write_text(job)
    (folder / "resolved.yaml").write_text(job)
    lines = [step_row(1, 2.0), *(step_row(step, 0.28 + 0.01 * step) for step in range(2, 6))] if rows is None else rows
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    return folder


@pytest.fixture(autouse=True)
def profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a user's profiles; it does not exist yet. Commands run where the job file was."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "rljob" / "profiles"


def test_a_run_is_compared_with_its_plan(rljob: Rljob, tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "demo")
    code, shown, errors = rljob("plan", "--from-run", str(run))
    assert (code, errors) == (0, "")
    assert shown == Mentions("5 steps, the first not counted", "responses as in the run: mean 6")
    generate = next(line for line in shown.splitlines() if line.startswith("  generate"))
    # Medians of the steps from the second on: 0.6 x (0.30, 0.31, 0.32, 0.33).
    assert re.search(r"0\.19 +0\.18 to 0\.20", generate), generate
    assert re.search(r"^  KV cache +1\.00 +1\.00 +1\.00$", shown, re.MULTILINE)
    assert re.search(r"^  process +", shown, re.MULTILINE)


def test_after_calibration_plans_predict_the_measured_times(rljob: Rljob, tmp_path: Path, profiles: Path) -> None:
    """The next plan finds the profile without an option."""
    run = write_run(tmp_path / "runs" / "demo")
    code, shown, _ = rljob("plan", "--calibrate", str(run))
    assert code == 0
    assert shown == Mentions(f"Wrote {profiles / 'cpu.json'}", "cpu")
    profile = read_profile(profiles / "cpu.json")
    assert profile.runs == (str(run),)
    assert profile.written_at.endswith("Z")
    report = run_report(PlanOptions(from_run=run))
    assert report.constants == str(run)
    step = next(each for each in report.times if each.name == "step")
    assert step.predicted is not None
    assert step.measured is not None
    assert step.predicted.likely == pytest.approx(step.measured.median, rel=0.05)
    process = next(each for each in report.memory if each.name == "process")
    assert process.predicted == pytest.approx(process.measured, rel=1e-6)
    assert process.measured == 1300 * 2**20
    assert f"  predicted with constants calibrated by {run}\n" in rljob("plan", "--from-run", str(run))[1]


def test_a_profile_in_another_file_is_used_only_if_it_is_named(rljob: Rljob, tmp_path: Path, profiles: Path) -> None:
    run, file = write_run(tmp_path / "runs" / "demo"), tmp_path / "mine.json"
    assert rljob("plan", "--calibrate", str(run), "--calibrate", str(run), "--profile", str(file))[0] == 0
    assert not profiles.exists()
    assert run_report(PlanOptions(from_run=run, profile=file)).constants == f"{run}, {run}"
    assert run_report(PlanOptions(from_run=run)).constants == "defaults"


def test_suggested_changes_have_their_gain_and_a_section_of_the_documentation(rljob: Rljob, tmp_path: Path) -> None:
    """The engine decodes 16 of 512 responses at the same time."""
    run = write_run(tmp_path / "runs" / "demo", job=JOB.replace("maxNumSequences: 512", "maxNumSequences: 16"))
    code, shown, _ = rljob("plan", "--from-run", str(run))
    assert code == 0
    assert "- spec.training.rollout.maxNumSequences: 16 -> " in shown
    assert '"sequences at once" in docs/tuning.md' in shown
    assert shown.splitlines()[-1].startswith("Advice: set spec.training.rollout.maxNumSequences: ")
    first = run_report(PlanOptions(from_run=run)).advice[0]
    assert first.change.field == "spec.training.rollout.maxNumSequences"
    assert first.gain > 0
    assert dict(first.phases)["generate"] == pytest.approx(first.gain)


def test_metrics_that_are_no_numbers_are_skipped(tmp_path: Path) -> None:
    """The trainer writes null for NaN and infinity."""
    run = write_run(tmp_path / "runs" / "demo")
    text = (run / "metrics.jsonl").read_text().splitlines()
    odd = text[2].replace('"timing_s/reward": ', '"timing_s/reward": NaN, "actor/kl_loss": null, "timing_s/x": ')
    (run / "metrics.jsonl").write_text("\n".join([*text[:2], odd, *text[3:]]) + "\n")
    facts = run_report(PlanOptions(from_run=run)).facts
    assert facts.num_steps == 5
    assert "reward" not in facts.steps[1].phases


def test_an_incomplete_last_line_of_metrics_is_skipped(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "demo")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "timing_s/st')
    assert run_report(PlanOptions(from_run=run)).facts.num_steps == 5


def edited(run: Path, name: str, text: str | None) -> Path:
    if text is None:
        (run / name).unlink()
    else:
        (run / name).write_text(text)
    return run


@pytest.mark.parametrize(
    ("name", "text", "facts"),
    [
        ("metrics.jsonl", None, ("has no metrics.jsonl", "no step has finished")),
        ("metrics.jsonl", "", ("metrics.jsonl", "finished step", "0 lines")),
        ("metrics.jsonl", '{"step": 0, "eval/heldout/greedy": 0.1}\n', ("metrics.jsonl", "finished step", "1 lines")),
        ("metrics.jsonl", "nonsense\n{}\n", ("metrics.jsonl", "line 1 is not valid JSON")),
        ("resolved.yaml", "kind: RLJob\nspec: {}\n", ("resolved.yaml", "version of rljob", "spec.training")),
        ("../../model/config.json", None, ("spec.training.model.source", "'./model' does not exist")),
    ],
)
def test_a_missing_or_damaged_file_of_a_run_gives_one_line_of_error(
    rljob: Rljob, tmp_path: Path, name: str, text: str | None, facts: tuple[str, ...]
) -> None:
    run = edited(write_run(tmp_path / "runs" / "demo"), name, text)
    for option in ("--from-run", "--calibrate"):
        code, shown, errors = rljob("plan", option, str(run))
        assert (code, shown, errors) == (2, "", Mentions(*facts))
        assert len(errors.strip().splitlines()) == 1


def test_a_folder_without_a_run_is_rejected(rljob: Rljob, tmp_path: Path) -> None:
    code, _, errors = rljob("plan", "--from-run", str(tmp_path / "nothing"))
    assert (code, errors) == (2, Mentions("nothing", "is not a folder", "runs/NAME"))
    code, _, errors = rljob("plan", "--from-run", str(tmp_path))
    assert (code, errors) == (2, Mentions("has no job.yaml", "not the folder of a run"))
    code, _, errors = rljob("plan", "--from-run", str(tmp_path), "--json")
    assert (code, errors) == (2, Mentions("error: --json", "job file"))


def test_a_run_with_too_few_steps_is_not_used_for_calibration(rljob: Rljob, tmp_path: Path, profiles: Path) -> None:
    run = write_run(tmp_path / "runs" / "demo", [step_row(1), step_row(2)])
    code, _, errors = rljob("plan", "--calibrate", str(run))
    assert (code, errors) == (2, Mentions(f"{run}", "2", "steps"))
    assert not profiles.exists()


@pytest.mark.parametrize("factor", [1e9, 1e-9])
def test_a_run_with_impossible_times_is_not_used_for_calibration(
    rljob: Rljob, tmp_path: Path, profiles: Path, factor: float
) -> None:
    """The fit keeps constants within bounds, so its prediction stays far from the measured step."""
    run = write_run(tmp_path / "runs" / "demo", [step_row(step, 0.3 * factor) for step in range(1, 6)])
    code, shown, errors = rljob("plan", "--calibrate", str(run))
    assert (code, shown) == (2, "")
    assert errors == Mentions(f"error: {run}", f"{0.3 * factor:.3g} s", "timing_s/step")
    assert len(errors.splitlines()) == 1
    assert not profiles.exists()


def test_a_run_on_gpus_needs_their_type(rljob: Rljob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU type that contradicts the metrics is rejected."""
    monkeypatch.setenv("PATH", str(tmp_path))  # no nvidia-smi
    rows = [step_row(step, **{"memory/other_bytes_max": 1e9}) for step in range(1, 6)]
    run = write_run(tmp_path / "runs" / "demo", rows)
    code, _, errors = rljob("plan", "--from-run", str(run))
    assert (code, errors) == (2, Mentions("--gpu H100"))
    assert rljob("plan", "--from-run", str(run), "--gpu", "H100")[0] == 0
    code, _, errors = rljob("plan", "--from-run", str(run), "--gpu", "cpu")
    assert (code, errors) == (2, Mentions("error: --gpu", "the run was on GPUs"))


def test_a_profile_survives_a_round_trip(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    file.symlink_to(tmp_path / "kept.json")
    constants = Constants(training_efficiency={"H100": 0.41}, pass_seconds=0.25, source="runs/x")
    write_profile(file, Profile("H100", constants, ("runs/x",), "2026-01-31T12:00:00Z"))
    assert constants_for({"H100"}, file) == constants
    written = json.loads((tmp_path / "kept.json").read_text())
    assert file.is_symlink()
    assert set(written["constants"]) == {"training_efficiency", "pass_seconds", "source"}
    with pytest.raises(CliError, match=r"profile is for H100.* planned for A100-80"):
        constants_for({"A100-80"}, file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"formatVersion": 2}, r"formatVersion: must be at most 1 \(seen 2\)"),
        ({"formatVersion": True}, r"formatVersion: is not valid \(seen true\)"),
        ({"kind": ""}, "kind: is not valid"),
        ({"runs": "runs/x"}, "runs: is not valid"),
        ({"constants": {"speed_of_light": 3e8}}, r"constants.speed_of_light: is not valid \(seen 300000000.0\)"),
        ({"constants": {"pass_seconds": "long"}}, r'constants.pass_seconds: is not valid \(seen "long"\)'),
        ({"constants": {"pass_seconds": True}}, r"constants.pass_seconds: is not valid \(seen true\)"),
        ({"constants": {"pass_seconds": -1}}, r"constants.pass_seconds: must be at least 0 \(seen -1"),
        ({"constants": {"step_seconds": float("nan")}}, r"constants.step_seconds: must be .* \(seen NaN\)"),
        (
            {"constants": {"process_bytes": float("inf")}},
            r"constants.process_bytes: must be at most 1e\+15 \(seen Infinity\)",
        ),
        ({"constants": {"separate_sync_bandwidth": 1e-300}}, r"separate_sync_bandwidth: must be at least 1000 \("),
        ({"constants": {"decode_bandwidth_efficiency": 1e-300}}, r"must be at least 1e-06 \(seen 1e-300"),
        ({"constants": {"allocator_factor": 0}}, r"allocator_factor: must be at least 1 \(seen 0\)"),
        ({"constants": {"spread": 2}}, r"constants.spread: must be at most 0.9 \(seen 2\)"),
        (
            {"constants": {"training_efficiency": {"H100": -0.1}}},
            r"constants.training_efficiency.H100: must be at least",
        ),
        ({"constants": [1]}, "constants: is not valid"),
    ],
)
def test_a_profile_with_an_invalid_value_is_rejected(tmp_path: Path, change: dict[str, object], message: str) -> None:
    file = tmp_path / "profile.json"
    write_profile(file, Profile("H100", Constants(), ("runs/x",), "2026-01-31T12:00:00Z"))
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(CliError, match=message):
        read_profile(file)


def test_a_file_that_is_no_profile_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    with pytest.raises(CliError, match=r"cannot be read \(No such file or directory\); check the path"):
        read_profile(file)
    file.write_text("no json")
    with pytest.raises(CliError, match="is not valid JSON"):
        read_profile(file)


def test_every_section_that_advice_names_exists_in_the_docs() -> None:
    """Advice and findings name sections of docs/tuning.md."""
    page = (REPOSITORY / "docs/tuning.md").read_text()
    headings = {line.lstrip("# ").lower() for line in page.splitlines() if line.startswith("###")}
    findings = (REPOSITORY / "cli/src/rljob_planner/advice/tuning.py").read_text()
    changes = (REPOSITORY / "cli/src/rljob_planner/memory/job_changes.py").read_text()
    named = set(re.findall(r', "([a-z ]+)"\)(?:\)|,\))$', findings, re.MULTILINE))
    assert named >= {"balance", "responses that are not trained on", "separate pools", "memory of the engine"}
    named |= set(re.findall(r'^.*section.*"([a-z -]+)"', changes, re.MULTILINE))
    named |= set(re.findall(r'(?:sizes|jobs\]|\[2\]), "([a-z ]+)"', changes))
    assert len(named) >= 15
    assert sorted(named - headings) == []
