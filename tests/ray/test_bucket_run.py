"""A run whose checkpoints are in a bucket is killed, and goes on in another run folder, as on another machine. It ends
bit for bit like the uninterrupted run in a folder."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.torch import load_file

from rljob_testing.buckets.s3_server import ACCESS_KEY, BUCKET, CREDENTIALS, SECRET_KEY, S3Server, s3_server
from rljob_testing.training import training_runs

pytestmark = [pytest.mark.ray, pytest.mark.long]

NUM_STEPS = 6


def job(folder: Path, server: S3Server | None) -> training_runs.Document:
    """Two workers, and a checkpoint after each step; without a server in the run folder."""
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint: training_runs.Document = {"everySteps": 1, "keep": 2}
    if server is not None:
        checkpoint["storage"] = {"s3": {"bucket": BUCKET, "prefix": "team/small", "endpoint": server.endpoint}}
    return training_runs.small_job(num_workers=2, checkpoint=checkpoint, steps=NUM_STEPS)


@dataclass(frozen=True)
class Runs:
    """The three runs."""

    whole: training_runs.Ended
    killed: training_runs.LocalRun
    resumed: training_runs.Ended


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("objects")) as server:
        yield server


@pytest.fixture(scope="module")
def runs(server: S3Server, cluster: str, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("runs")
    whole = training_runs.RunTrainer(folder / "whole")(job(folder / "whole", None), cluster)
    killed = training_runs.LocalRun(folder / "killed", job(folder / "killed", server), "--bucket", **CREDENTIALS)
    killed.wait_for(lambda: any("step-00000002" in key and "manifest" in key for key in server.keys("team/small")))
    for process in killed.processes_of_run():
        os.kill(process.pid, signal.SIGKILL)
    killed.end()
    resumed = training_runs.RunTrainer(folder / "resumed")(
        job(folder / "resumed", server), None, attempt=2, RLJOB_START_NUMBER="2000000000", **CREDENTIALS
    )
    return Runs(whole, killed, resumed)


def test_the_resumed_run_is_complete_and_equals_the_uninterrupted_one(runs: Runs, server: S3Server) -> None:
    assert runs.whole.exit_code == 0, runs.whole.terminal
    assert runs.resumed.exit_code == 0, runs.resumed.terminal
    state = runs.resumed.files.state()
    assert state.phase == "Complete"
    assert state.resumed_from_step is not None
    assert 2 <= state.resumed_from_step < NUM_STEPS
    for name in ("critic/rewards/mean", "actor/pg_loss", "actor/grad_norm", "actor/lr"):
        expected = runs.whole.files.series(name)
        assert len(expected) == NUM_STEPS
        assert runs.resumed.files.series(name) == expected
    exported = server.folder / BUCKET / "team/small/run/export/model.safetensors"
    expected_weights = load_file(runs.whole.files.folder / "export" / "model.safetensors")
    found = load_file(exported)
    assert found.keys() == expected_weights.keys()
    assert all(found[name].equal(weight) for name, weight in expected_weights.items())


def test_the_bucket_has_the_newest_checkpoints_and_the_files_of_the_run(runs: Runs, server: S3Server) -> None:
    keys = server.keys("team/small")
    manifests = [key for key in keys if key.endswith("manifest.json")]
    assert [manifest.split("/")[1] for manifest in manifests] == [
        f"step-{step:08d}.start-2000000000" for step in (NUM_STEPS - 1, NUM_STEPS)
    ]
    assert {"run/metrics.jsonl", "run/samples.jsonl", "run/rljob-run-state.json", "run/plots/overview.png"} <= {*keys}
    in_bucket = server.folder / BUCKET / "team/small/run"
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert (in_bucket / name).read_bytes() == (runs.resumed.files.folder / name).read_bytes()
    assert '"Complete"' in (in_bucket / "rljob-run-state.json").read_text()


def test_credentials_are_in_no_output_and_no_file(runs: Runs, server: S3Server) -> None:
    files = [path for folder in (runs.killed.files.folder, runs.resumed.files.folder) for path in folder.rglob("*")]
    texts = [runs.killed.output.encode(), runs.resumed.terminal.encode()]
    objects = [path for path in (server.folder / BUCKET).rglob("*") if path.is_file()]
    texts += [path.read_bytes() for path in (*files, *objects) if path.is_file()]
    assert len(texts) > 20
    for secret in (ACCESS_KEY, SECRET_KEY):
        assert not any(secret.encode() in text for text in texts)
