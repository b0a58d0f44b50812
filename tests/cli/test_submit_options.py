"""`rljob submit` with --dry-run, --name and --set, against a real API server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rljob_operator.raw_json import object_at
from rljob_testing.cli.job_cluster import JobCluster
from rljob_testing.cli.rljob_command import SMALL_JOB
from rljob_testing.messages import Mentions

pytestmark = pytest.mark.apiserver

Rljob = Callable[..., tuple[int, str, str]]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(SMALL_JOB + "  checkpoint: {storage: {persistentVolumeClaim: results}}\n")
    return path


def test_a_dry_run_changes_nothing_and_is_validated_by_the_server(
    job_cluster: JobCluster, rljob: Rljob, file: Path
) -> None:
    where = f"RLJob {job_cluster.namespace}/small"
    dry = "dry run: the API server has accepted this, and nothing was changed"
    assert rljob("submit", str(file), "--dry-run") == (0, f"{where} would be created (context here)\n{dry}\n", "")
    assert "no jobs" in rljob("list")[2]
    rljob("submit", str(file))
    assert rljob("submit", str(file), "--dry-run")[1].splitlines() == [
        f"{where} already exists with this spec (New)",
        dry,
    ]
    before = job_cluster.job("small")["metadata"]
    values = ("--set", "spec.runPolicy.maxAppRetries=7", "--set", "metadata.labels[kueue.x-k8s.io/queue-name]=gpus")
    code, output, _ = rljob("submit", str(file), "--dry-run", *values)
    assert code == 0
    assert output.splitlines() == [
        f"{where} already exists; would change:",
        "  spec.runPolicy.maxAppRetries: 2 -> 7",
        '  metadata.labels[kueue.x-k8s.io/queue-name]: unset -> "gpus"',
        Mentions("next attempt uses these labels"),
        dry,
    ]
    assert job_cluster.job("small")["metadata"] == before
    code, _, errors = rljob("submit", str(file), "--dry-run", "--set", "spec.training.steps=9")
    assert (code, errors) == (2, Mentions("already exists with another spec", "spec.training.steps: 3 -> 9"))
    assert rljob("submit", str(file), "--dry-run", "--watch")[::2] == (2, Mentions("error: --dry-run", "--watch"))


def test_name_and_values_of_the_command_line_replace_those_of_the_file(
    job_cluster: JobCluster, rljob: Rljob, file: Path
) -> None:
    text = file.read_text()
    code, output, _ = rljob("submit", str(file), "--name", "other", "--set", "spec.pools[main].nodes=2")
    assert (code, output) == (0, Mentions(f"RLJob {job_cluster.namespace}/other created", "rljob status other"))
    [pool] = object_at(job_cluster.job("other"), "spec")["pools"]  # type: ignore[misc]
    assert pool["nodes"] == 2
    assert file.read_text() == text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "spec.training.stepss=1"], "--set: spec.training.stepss: is not a field of a job; did you mean"),
        (["--set", "spec.training.steps=x"], '--set: spec.training.steps: must be a whole number (seen: "x")'),
        (["--set", "x"], "--set: x: must have the form PATH=VALUE"),
        (["--name", "No"], "--name: metadata.name: must have at most 46 lower case letters"),
    ],
)
def test_a_wrong_value_of_the_command_line_is_reported_with_its_option(
    job_cluster: JobCluster, rljob: Rljob, file: Path, arguments: list[str], message: str
) -> None:
    for command in ("submit", "validate"):
        code, output, errors = rljob(command, str(file), *arguments)
        assert code == 2
        assert message in output + errors
        assert "Traceback" not in errors
    assert "no jobs" in rljob("list")[2]
    assert job_cluster.namespace
