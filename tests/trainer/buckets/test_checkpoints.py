"""Checkpoints in a bucket, against a real S3 server: fencing, damage, outages, and saves that do not block training."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rljob_api.contract_documents import TrainerJob
from rljob_api.v1alpha1.checkpoint import Checkpoint, CheckpointStorage, S3Storage
from rljob_api.v1alpha1.job import RLJob
from rljob_bucket.paths import BucketPath
from rljob_testing.buckets.clients import quick_client
from rljob_testing.buckets.fault_proxy import Fault, FaultProxy, Request
from rljob_testing.buckets.s3_server import S3Server
from rljob_testing.jobs.valid_job import valid_job
from rljob_testing.training import small_checkpoints
from rljob_testing.training.small_checkpoints import CHOICES, LocalActor, parts_at, save_step
from rljob_trainer.checkpoints import load
from rljob_trainer.checkpoints.errors import CheckpointError, FencedError, StorageUnavailableError
from rljob_trainer.checkpoints.fencing import accept_up_to, announce_start, newest_of_job, visible_checkpoints
from rljob_trainer.checkpoints.load import find_newest_complete, open_checkpoint
from rljob_trainer.checkpoints.save import begin_save, commit, discard_save, save_shard
from rljob_trainer.checkpoints.sharding import ShardedTensor
from rljob_trainer.checkpoints.storage import checkpoint_location
from rljob_trainer.controller.checkpointing import Checkpointing


@pytest.fixture
def root(server: S3Server, proxy: FaultProxy) -> BucketPath:
    """A new folder for checkpoints, behind the proxy."""
    return server.path(f"job-{time.monotonic_ns()}/checkpoints", proxy.endpoint)


def test_the_location_is_that_of_the_spec(tmp_path: Path) -> None:
    def location(storage: CheckpointStorage | None, namespace: str | None = None) -> str:
        spec = RLJob.from_wire(valid_job()).spec
        checkpoint = spec.checkpoint.model_copy(update={"storage": storage})
        spec = spec.model_copy(update={"checkpoint": checkpoint})
        return str(checkpoint_location(TrainerJob(name="job", namespace=namespace, spec=spec), tmp_path))

    with_prefix = CheckpointStorage(s3=S3Storage(bucket="abc", prefix="team/run", region="eu-west-1"))
    assert location(with_prefix, "team-a") == "s3://abc/team/run/checkpoints"
    # Jobs of one name in two namespaces have different folders.
    without_prefix = CheckpointStorage(s3=S3Storage(bucket="abc"))
    assert location(without_prefix, "team-a") == "s3://abc/team-a/job/checkpoints"
    assert location(without_prefix) == "s3://abc/default/job/checkpoints"
    assert location(CheckpointStorage(persistent_volume_claim="c")) == str(tmp_path)
    assert location(None) == str(tmp_path)


def test_of_two_processes_with_one_start_number_one_is_refused(proxy: FaultProxy, root: BucketPath) -> None:
    proxy.choose = lambda request: Fault.LOST_ANSWER if request.kind == "PUT if absent" else None
    announce_start(root, 1)
    proxy.reset()
    with pytest.raises(FencedError, match="start 1 was already announced"):
        announce_start(root, 1)


def test_a_start_that_commits_while_a_later_one_announces_itself_is_fenced(
    server: S3Server, proxy: FaultProxy, root: BucketPath
) -> None:
    announce_start(root, 1)
    save_step(root, 10, 1)
    direct = server.path(root.key)

    def at_manifest(request: Request) -> Callable[[bool], None] | None:
        return announce_second if request.target.endswith("manifest.json") and request.is_conditional else None

    def announce_second(is_after: bool) -> None:
        if not is_after:
            announce_start(direct, 2)

    proxy.choose = at_manifest
    with pytest.raises(FencedError, match="start 2"):
        save_step(root, 20, 1)
    found = find_newest_complete(direct, 2)
    assert found is not None
    assert found.manifest.step == 10
    assert [folder.step for folder in visible_checkpoints(direct, 2)] == [10]


def test_changed_bytes_are_damage_and_the_checkpoint_before_is_used(server: S3Server, root: BucketPath) -> None:
    announce_start(root, 1)
    save_step(root, 10, 1)
    save_step(root, 20, 1)
    shard = server.folder / root.bucket / root.key / "step-00000020.start-0001" / "rank-00001.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    found = find_newest_complete(root, 2)
    assert found is not None
    assert found.manifest.step == 10
    assert "rank-00001.safetensors: digest of tensor weight" in str(found.rejected[0])


@pytest.mark.parametrize("fault", [Fault.FORBIDDEN, Fault.LOST_REQUEST])
def test_a_store_that_does_not_serve_a_checkpoint_is_not_damage(
    proxy: FaultProxy, root: BucketPath, fault: Fault
) -> None:
    announce_start(root, 1)
    save_step(root, 10, 1, jobName="job")
    save_step(root, 20, 1, jobName="job")
    proxy.choose = lambda request: fault if "00000020" in request.target else None
    with quick_client(seconds=0.2), pytest.raises(StorageUnavailableError, match=root.bucket):
        find_newest_complete(root, 2)
    # Only a first report, which must not end the run.
    with quick_client(seconds=0.2):
        assert newest_of_job(root, 2, "job") is None


def test_a_failed_save_keeps_its_files_until_the_next_commit(
    server: S3Server, proxy: FaultProxy, root: BucketPath
) -> None:
    announce_start(root, 1)
    accept_up_to(root, 1, None)
    folder = begin_save(root, 10, 1)
    whole = small_checkpoints.values_of(10)
    record = save_shard(folder, 0, [ShardedTensor("weight", whole, (5, 3), (0, 0))])
    proxy.choose = lambda request: Fault.FORBIDDEN if request.kind == "PUT if absent" else None
    with pytest.raises(StorageUnavailableError, match="access is denied"):
        commit(root, folder, 10, 1, [record], {})
    discard_save(folder)
    # If only the answer was lost, the manifest may still appear.
    assert server.keys(folder.key) == ["rank-00000.safetensors"] if isinstance(folder, BucketPath) else False
    proxy.reset()
    commit(root, folder, 10, 1, [record], {})
    with pytest.raises(CheckpointError, match="already committed"):
        commit(root, folder, 10, 1, [record], {"other": 1})


def test_the_controller_commits_in_the_background(proxy: FaultProxy, root: BucketPath) -> None:
    may_commit = threading.Event()

    def wait_at_manifest(request: Request) -> Callable[[bool], None] | None:
        return (lambda _: [may_commit.wait(20)].clear()) if request.kind == "PUT if absent" else None

    actor = LocalActor(torch.ones(4, 2), num_ranks=2)
    saves = Checkpointing(Checkpoint(keep=1), root, 1, "job")
    assert saves.find() is None
    saves.choices = CHOICES
    copied: list[int] = []
    saves.before_commit = lambda: copied.append(1)
    saves.begin(10, parts_at(3), [actor])
    proxy.reset(wait_at_manifest)
    wait_for(lambda: saves.finish([actor], wait=False, is_evaluated=True) is None and len(proxy.requests) > 0)
    assert saves.pending is not None
    may_commit.set()
    wait_for(lambda: saves.pending is None or saves.finish([actor], wait=False, is_evaluated=True) is not None)
    assert copied == [1]
    proxy.reset()
    saves.begin(20, parts_at(4), [actor])
    committed = saves.finish([actor], wait=True, is_evaluated=True)
    assert committed is not None
    assert committed.uri == f"{root}/step-00000020.start-0001"
    assert [folder.step for folder in visible_checkpoints(root, 1)] == [20]
    resumed = Checkpointing(Checkpoint(), root, 2, "job")
    point = resumed.find()
    assert point is not None
    actor.weight.zero_()
    resumed.load(point, [actor], num_workers=2)
    assert torch.equal(actor.weight, torch.ones(4, 2))


def test_a_commit_that_fails_in_the_background_is_raised_later(proxy: FaultProxy, root: BucketPath) -> None:
    actor = LocalActor(torch.ones(4, 2))
    saves = Checkpointing(Checkpoint(), root, 1, "job")
    saves.find()
    saves.choices = CHOICES
    saves.begin(10, parts_at(3), [actor])
    proxy.choose = lambda request: Fault.FORBIDDEN if request.kind == "PUT if absent" else None
    with pytest.raises(StorageUnavailableError):
        saves.finish([actor], wait=True, is_evaluated=True)
    assert saves.pending is None


def test_any_number_of_ranks_reads_only_its_ranges(proxy: FaultProxy, root: BucketPath) -> None:
    announce_start(root, 1)
    save_step(root, 10, 1)
    found = find_newest_complete(root, 2)
    assert found is not None
    proxy.reset()
    rows = torch.empty(2, 3)
    open_checkpoint(found.folder).read_into("weight", (0, 0), rows)
    assert torch.equal(rows, small_checkpoints.values_of(10)[:2])
    assert not [request for request in proxy.requests if request.target.endswith("rank-00001.safetensors")]


def test_small_and_large_tensors_are_loaded(root: BucketPath, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "MAX_BYTES_IN_PARALLEL", 40)
    announce_start(root, 1)
    folder = begin_save(root, 10, 1)
    saved = {f"layer.{number}": torch.arange(number, dtype=torch.float32) for number in range(20)}
    record = save_shard(folder, 0, [ShardedTensor(name, each, (len(each),), (0,)) for name, each in saved.items()])
    commit(root, folder, 10, 1, [record], {})
    loaded = {name: torch.full_like(each, -1) for name, each in saved.items()}
    load.load_into(loaded.items(), open_checkpoint(folder))
    assert all(torch.equal(loaded[name], each) for name, each in saved.items())
    with pytest.raises(CheckpointError, match=r"layer\.3 was saved with shape"):
        load.load_into([("layer.2", torch.empty(2)), ("layer.3", torch.empty(4))], open_checkpoint(folder))


def wait_for(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
