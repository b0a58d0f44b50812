"""What W&B and MLflow store: W&B offline and MLflow's folder are read back."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from rljob_api.constants import ExitCode
from rljob_api.job_file import resolved_job_text
from rljob_api.v1alpha1.dataset import Evaluation
from rljob_api.v1alpha1.spec import Metadata
from rljob_api.v1alpha1.tracker import Tracker
from rljob_testing.messages import Mentions
from rljob_testing.training import tracker_files, training_runs
from rljob_testing.training.tracker_files import mlflow_runs, wandb_files
from rljob_testing.training.tracker_servers import answering_server
from rljob_trainer.controller.evaluations.scores import ScoredResponse, evaluation_metrics
from rljob_trainer.observability.samples import Sample, SampleKind
from rljob_trainer.trackers import tracker_process, trackers
from rljob_trainer.trackers.messages import (
    REPORT_PREFIX,
    Begin,
    End,
    Message,
    MetricsRow,
    RunFacts,
    SampleTable,
    encode,
)
from rljob_trainer.trackers.tracker_program import forward_messages

SAMPLE = Sample(
    2,
    SampleKind.GREEDY,
    7,
    "1+1=",
    "2" * 5000,
    "2",
    1.0,
    {"a": 0.5, "b": None},
    outcome="COMPLETED",
    evaluation="heldout",
)


def test_samples_are_limited_and_long_texts_are_cut() -> None:
    table = trackers.sample_table(2, [SAMPLE] * 100)
    assert table.columns == [
        "kind",
        "group",
        "prompt",
        "response",
        "answer",
        "outcome",
        "score",
        "reward/a",
        "reward/b",
    ]
    assert len(table.rows) == trackers.MAX_ROWS
    response = "2" * trackers.MAX_CELL_CHARS + "... (1000 more characters)"
    assert table.rows[0] == ["eval_greedy", 7, "1+1=", response, "2", "COMPLETED", 1.0, 0.5, None]
    assert trackers.sample_table(0, []).rows == []


def begin(folder: Path, attempt: int, resumed_from_step: int | None, tracker: training_runs.Document) -> Begin:
    text = resolved_job_text(Metadata(name="small"), tracker_files.job().spec)
    facts = RunFacts(
        "small", "team", "the-uid", attempt, str(folder), str(folder / "state.json"), resumed_from_step, text
    )
    return Begin(facts, Tracker.from_wire(tracker))


@dataclass(frozen=True)
class RejectedRun:
    """A run whose API key the W&B server rejects, and whose trainer is then killed."""

    folder: Path
    exit_code: int
    output: str


@pytest.fixture(scope="module")
def rejected(tmp_path_factory: pytest.TempPathFactory) -> RejectedRun:
    folder = tmp_path_factory.mktemp("rejected")
    output = folder / "output"
    (folder / "metrics.jsonl").write_text('{"step": 5, "critic/rewards/mean": 0.5}\n')
    with answering_server(401) as address, output.open("w") as file:
        program = subprocess.Popen(
            [sys.executable, "-m", tracker_process.PROGRAM, "WandB"],
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**tracker_process.VARIABLES, **tracker_files.ENVIRONMENT, "WANDB_BASE_URL": address},
        )
        assert program.stdin is not None
        program.stdin.write(encode(begin(folder, 2, 4, {"type": "WandB"})))
        for step in (5, 6):
            program.stdin.write(encode(MetricsRow(step, 0.0, {"a/b": step / 3, "c": math.nan})))
        program.stdin.write(encode(table := trackers.sample_table(6, [SAMPLE])))
        program.stdin.write(encode(replace(table, name="samples/other")))
        # What the kernel does when the trainer is killed while it writes.
        program.stdin.write(encode(MetricsRow(7, 0.0, {"a/b": 1.0}))[:-5])
        program.stdin.close()
        code = program.wait(timeout=120)
    return RejectedRun(folder, code, output.read_text())


def test_a_run_that_wandb_rejects_is_stored_as_files_with_all_rows(rejected: RejectedRun) -> None:
    assert rejected.exit_code == 0, rejected.output
    [reported] = [line for line in rejected.output.splitlines() if line.startswith(REPORT_PREFIX)]
    assert reported == Mentions("401", "wandb sync", f"{rejected.folder}/wandb")
    [file] = wandb_files(rejected.folder)
    assert file.run_id == "the-uid"
    assert file.tags == ["job:small", "namespace:team", "attempt:2"]
    assert {step: row["a/b"] for step, row in file.rows.items()} == {5: 5 / 3, 6: 2.0}
    assert file.config["run"] == {"attempt": 2, "resumedFromStep": 4}
    stored = json.loads(json.dumps(file.config["job"]))
    assert stored["spec"]["training"]["steps"] == tracker_files.job().spec.training.steps


def test_wandb_gets_tables_of_samples(rejected: RejectedRun) -> None:
    tables = list(rejected.folder.rglob("*.table.json"))
    assert {table.name.partition("_")[0] for table in tables} == {"heldout", "other"}
    for table in tables:
        content = json.loads(table.read_text())
        assert content["columns"] == trackers.sample_table(6, [SAMPLE]).columns
        assert [row[2] for row in content["data"]] == ["1+1="]


def test_a_killed_trainer_fails_the_run_in_the_tracker(rejected: RejectedRun) -> None:
    assert [file.exit_code for file in wandb_files(rejected.folder)] == [1]
    # The page would delay the end.
    assert list(rejected.folder.rglob("*.html")) == []


def test_the_api_key_is_in_no_file(rejected: RejectedRun) -> None:
    files = [path for path in rejected.folder.rglob("*") if path.is_file()]
    assert len(files) > 5
    assert [path for path in files if tracker_files.KEY.encode() in path.read_bytes()] == []


@pytest.mark.usefixtures("mlflow_variables")
def test_mlflow_gets_each_metric_once_per_step_under_one_run(tmp_path: Path, reports: list[str]) -> None:
    from rljob_trainer.trackers.mlflow_run import start_mlflow_run

    def report(_: str, text: str) -> None:
        reports.append(text)

    tracker: training_runs.Document = {"type": "MLflow", "mlflow": {"experiment": "sorting"}}
    first = start_mlflow_run(begin(tmp_path, 1, None, tracker), report)
    for step in (1, 2, 3):
        first.log_metrics(MetricsRow(step, 100.0 + step, {"reward/mean": float(step)}))
    first.log_samples(trackers.sample_table(2, [SAMPLE]))
    first.log_samples(replace(trackers.sample_table(2, []), name="samples/other"))
    (tmp_path / "view.html").write_text("first")
    first.log_page(tmp_path / "view.html")
    first.finish(ExitCode.INTERRUPTED)
    second = start_mlflow_run(begin(tmp_path, 2, 1, tracker), report)
    for step in (2, 3, 4):
        second.log_metrics(MetricsRow(step, 200.0 + step, {"reward/mean": 10.0 * step}))
        second.log_metrics(MetricsRow(step, 200.0 + step, {"eval/heldout/mean_at_4": 0.5}))
    (tmp_path / "view.html").write_text("second")
    second.log_page(tmp_path / "view.html")
    second.finish(ExitCode.SUCCESS)

    [run] = mlflow_runs(tmp_path)
    assert run.status == "FINISHED"
    assert run.values["reward/mean"] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]
    assert run.values["eval/heldout/mean_at_4"] == [(2, 0.5), (3, 0.5), (4, 0.5)]
    assert run.params["training.rollout.groupSize"] == "4"
    assert {name: run.tags[f"rljob.{name}"] for name in ("job", "namespace", "attempt", "resumedFromStep")} == {
        "job": "small",
        "namespace": "team",
        "attempt": "2",
        "resumedFromStep": "1",
    }
    assert set(run.files) == {
        *("job.yaml", "view.html"),
        *("samples/heldout/step-000002.json", "samples/other/step-000002.json"),
    }
    assert run.files["view.html"] == "second"
    assert json.loads(run.files["samples/heldout/step-000002.json"])["data"][0][2] == "1+1="
    assert [text for text in reports if "earlier attempt" in text] == [Mentions("steps 2 to 3", "metrics.jsonl")]


@pytest.mark.usefixtures("mlflow_variables")
def test_mlflow_gets_the_evaluation_of_a_job_with_several_rewards(tmp_path: Path, reports: list[str]) -> None:
    from rljob_trainer.trackers.mlflow_run import start_mlflow_run

    # All names of an evaluation are accepted, and none is the folder of another in MLflow's folder.
    responses = [ScoredResponse(0, 0.5, {"accuracy": 0.0, "format": 1.0}, "18", 3)]
    scores = evaluation_metrics(Evaluation(), responses, responses)
    score = "eval/heldout/greedy"
    assert len(scores) == 10
    run = start_mlflow_run(begin(tmp_path, 1, None, {"type": "MLflow"}), lambda _, text: reports.append(text))
    # Responses may have some of the scores, but no sum of all.
    run.log_metrics(MetricsRow(1, 0.0, {name: value for name, value in scores.items() if name != score}))
    run.log_metrics(MetricsRow(2, 0.0, scores))
    [stored] = mlflow_runs(tmp_path)
    steps = {name: [step for step, _ in points] for name, points in stored.values.items()}
    assert steps == {name: [2] if name == score else [1, 2] for name in scores}
    # In a later attempt, too, under the same names.
    resumed = start_mlflow_run(begin(tmp_path, 2, 1, {"type": "MLflow"}), lambda _, text: reports.append(text))
    resumed.log_metrics(MetricsRow(2, 0.0, scores))
    assert mlflow_runs(tmp_path)[0].values == stored.values


@pytest.mark.usefixtures("mlflow_variables")
def test_a_folder_that_cannot_be_written_is_no_server_that_does_not_respond(tmp_path: Path, reports: list[str]) -> None:
    from mlflow.exceptions import MlflowException

    from rljob_trainer.trackers.mlflow_run import start_mlflow_run

    run = start_mlflow_run(begin(tmp_path, 1, None, {"type": "MLflow"}), lambda _, text: reports.append(text))
    run.log_metrics(MetricsRow(1, 0.0, {"a": 1.0}))
    # The metric `a` is a file.
    with pytest.raises(MlflowException):
        run.log_metrics(MetricsRow(1, 0.0, {"a/b": 1.0}))
    assert [text for text in reports if "respond" in text] == []


class RecordedRun:
    """A run in a tracker that accepts no page. Keeps the names of the calls."""

    def __init__(self, *, stores_page_after_end: bool) -> None:
        self.stores_page_after_end = stores_page_after_end
        self.calls: list[str] = []

    def log_metrics(self, row: MetricsRow) -> None:
        """See TrackerRun."""
        self.calls.append(f"metrics of step {row.step}")

    def log_samples(self, table: SampleTable) -> None:
        """See TrackerRun."""
        self.calls.append(f"samples of step {table.step}")

    def log_page(self, page: Path) -> None:
        """See TrackerRun."""
        assert page.stat().st_size > 0
        self.calls.append("page")
        raise OSError("no space left")

    def finish(self, exit_code: int) -> None:
        """See TrackerRun."""
        self.calls.append(f"end with {exit_code}")


@pytest.mark.parametrize("stores_page_after_end", [False, True])
@pytest.mark.parametrize("end", [End(75, sends_page=True), End(130, sends_page=False), None])
def test_the_page_is_made_once_and_only_if_there_is_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], end: End | None, stores_page_after_end: bool
) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "critic/rewards/mean": 0.5}\n')
    messages: list[Message] = [
        MetricsRow(1, 0.0, {}),
        SampleTable("samples", 1, [], []),
        MetricsRow(2, 0.0, {}),
        *([end] if end else []),
    ]
    run = RecordedRun(stores_page_after_end=stores_page_after_end)
    forward_messages(map(encode, messages), run, begin(tmp_path, 1, None, {"type": "MLflow"}))
    sends_page, ended = end is not None and end.sends_page, f"end with {end.exit_code if end else 1}"
    ending = ([ended, "page"] if stores_page_after_end else ["page", ended]) if sends_page else [ended]
    assert run.calls == ["metrics of step 1", "samples of step 1", "metrics of step 2", *ending]
    assert ("its page may be incomplete: no space left" in capsys.readouterr().out) is sends_page


@pytest.mark.usefixtures("mlflow_variables")
def test_names_that_mlflow_does_not_accept_are_changed(tmp_path: Path) -> None:
    from rljob_trainer.trackers.mlflow_run import job_parameters, start_mlflow_run

    arguments = {"temperature (C)": 1, "a,b": 2, "x=y": 3, "a/": 4, "..": 5, "größe": 6, "x?y": 7, "l" * 300: 8}
    text = json.dumps({"spec": {"training": {"arguments": arguments}}})
    names = {name.removeprefix("training.arguments."): value for name, value in job_parameters(text).items()}
    # Of two settings with the same name the first stays.
    assert list(names)[:-1] == ["temperature _C_", "a_b", "x_y", "a_", "..", "größe"]
    assert list(names.values()) == ["1", "2", "3", "4", "5", "6", "8"]
    started = begin(tmp_path, 1, None, {"type": "MLflow"})
    start_mlflow_run(replace(started, facts=replace(started.facts, job_text=text)), lambda _, __: None)
    [run] = mlflow_runs(tmp_path)
    assert run.params["training.arguments.a_b"] == "2"
    assert len(run.params) == len(names)


@pytest.mark.usefixtures("mlflow_variables")
def test_if_mlflow_rejects_the_parameters_the_rest_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reports: list[str]
) -> None:
    from rljob_trainer.trackers import mlflow_run

    monkeypatch.setattr(mlflow_run, "job_parameters", lambda _: {"not, accepted": "1"})
    run = mlflow_run.start_mlflow_run(
        begin(tmp_path, 1, None, {"type": "MLflow"}), lambda _, text: reports.append(text)
    )
    run.log_metrics(MetricsRow(1, 0.0, {"a": 1.0}))
    [stored] = mlflow_runs(tmp_path)
    assert (stored.values, set(stored.files)) == ({"a": [(1, 1.0)]}, {"job.yaml"})
    assert reports[-1] == Mentions("MLflow", "parameters", "not, accepted")


@pytest.fixture
def mlflow_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    from rljob_trainer.trackers import mlflow_run

    # A call that is repeated raises IndexError at once.
    monkeypatch.setattr(mlflow_run, "RETRY_SECONDS", ())
    for name, value in tracker_process.VARIABLES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture
def reports() -> list[str]:
    return []
