"""vLLM and FSDP2 in the same processes: both engines give the same log-probabilities after every update, with and
without tensor parallelism, and the metric that compares them would show stale weights."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from rljob_testing.ray_clusters import hybrid_workers, local_ray
from rljob_testing.training import training_runs
from rljob_trainer.controller import model_roles

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.long]

NUM_UPDATES = 2
NUM_STALE_STEPS = 1
CACHE_BYTES = 64 * 2**20


def job(tensor_parallel: int, num_steps: int) -> training_runs.Document:
    job = training_runs.small_job(
        num_workers=2,
        # One of the two runs with everything offloaded.
        model={"offload": dict.fromkeys(("parameters", "gradients", "optimizer"), tensor_parallel > 1)},
        rollout={
            "engine": "VLLM",
            # One engine is compiled, the other is not.
            "compile": "Always" if tensor_parallel == 1 else "Never",
            "cpuKvCache": str(CACHE_BYTES),
            "maxNumSequences": 64,
        },
        optimizer={"learningRate": 1.0e-3},
        steps=num_steps,
        batchSize=8,
        checkpoint={"everySteps": 100, "exportHuggingFace": "Never"},
    )
    spec = job["spec"]
    assert isinstance(spec, dict)
    spec["roles"] = {"rollout": {"tensorParallel": tensor_parallel}}
    return job


@dataclass(frozen=True)
class WatchedRun:
    """A run, and for each rank the digest of the generating weights at each policy version."""

    run: training_runs.Ended
    digests: list[dict[int, str]]
    texts: list[list[str]]
    """By rank, see `hybrid_workers.watched_hybrid.texts_of`."""
    compiles: list[str]
    """By rank, `True` or `False`."""
    left_in_memory: set[str]
    """Names in /dev/shm that did not exist before."""


def watch(folder: Path, cluster: str, tensor_parallel: int, num_steps: int, stale_from: int) -> WatchedRun:
    before = shared_memory()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_roles, "make_hybrid", partial(hybrid_workers.watched_hybrid, stale_from))
        run = training_runs.RunTrainer(folder)(job(tensor_parallel, num_steps), cluster)
    assert run.exit_code == 0, run.terminal
    logs = [(run.files.folder / "logs" / f"worker-{rank}.log").read_text() for rank in (0, 1)]
    lines = [re.findall(r"^weights (\d+) (\w+)$", log, re.MULTILINE) for log in logs]
    digests = [{int(version): digest for version, digest in found} for found in lines]
    texts = [json.loads(re.findall(r"^texts (.*)$", log, re.MULTILINE)[0]) for log in logs]
    compiles = [re.findall(r"^compiles (\w+)$", log, re.MULTILINE)[0] for log in logs]
    return WatchedRun(run, digests, texts, compiles, shared_memory() - before)


def shared_memory() -> set[str]:
    """Files in shared memory of tensor-parallel vLLM: of the CPU backend, and of the queue between the ranks."""
    return {path.name for pattern in ("*cpushm*", "psm_*") for path in Path("/dev/shm").glob(pattern)}


@pytest.fixture(scope="module")
def compiling_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A cluster whose workers import torch themselves: forked workers do not compile."""
    with local_ray.ray_cluster(2, tmp_path_factory.mktemp("ray") / "ray.log") as address:
        yield address


@pytest.fixture(scope="module")
def data_parallel(compiling_cluster: str, tmp_path_factory: pytest.TempPathFactory) -> WatchedRun:
    """One engine per rank; after some updates the weight sync is switched off."""
    folder = tmp_path_factory.mktemp("data-parallel")
    return watch(folder, compiling_cluster, 1, NUM_UPDATES + 1 + NUM_STALE_STEPS, stale_from=NUM_UPDATES + 1)


@pytest.fixture(scope="module")
def tensor_parallel(cluster: str, tmp_path_factory: pytest.TempPathFactory) -> WatchedRun:
    """One engine on both ranks."""
    return watch(
        tmp_path_factory.mktemp("tensor-parallel"), cluster, 2, NUM_UPDATES + 1, stale_from=hybrid_workers.NEVER
    )


def differences(watched: WatchedRun) -> list[float]:
    """Per step, the largest difference between the log-probabilities of the two engines."""
    return watched.run.files.series("rollout/logprob_diff_max")


def test_both_engines_agree_at_every_step(data_parallel: WatchedRun, tensor_parallel: WatchedRun) -> None:
    for watched in (data_parallel, tensor_parallel):
        in_sync = differences(watched)[: NUM_UPDATES + 1]
        assert len(in_sync) == NUM_UPDATES + 1
        assert all(0 < difference < 1e-3 for difference in in_sync), in_sync


def test_the_recorded_logprobs_of_the_last_step_differ_by_as_much(
    data_parallel: WatchedRun, tensor_parallel: WatchedRun
) -> None:
    for watched in (data_parallel, tensor_parallel):
        tokens = [each["tokens"] for each in watched.run.files.tokens("training")["conversations"]]
        pairs = [pair for each in tokens for pair in zip(each["trainerLogprob"], each["rolloutLogprob"], strict=True)]
        found = [abs(ours - theirs) for ours, theirs in pairs if ours is not None and theirs is not None]
        assert len(found) == sum(sum(each["isSampled"]) for each in tokens) > 0
        # Numbers in the file have five decimal places.
        assert max(found) <= differences(watched)[-1] + 1e-5


def test_a_missing_weight_sync_shows_in_the_metric(data_parallel: WatchedRun) -> None:
    stale = differences(data_parallel)[NUM_UPDATES + 1 :]
    assert len(stale) == NUM_STALE_STEPS
    assert all(difference > 0.05 for difference in stale), stale


def test_both_ranks_generate_with_the_same_new_weights(data_parallel: WatchedRun) -> None:
    first, second = data_parallel.digests
    assert first == second
    assert sorted(first) == list(range(NUM_UPDATES + 1 + NUM_STALE_STEPS))
    fresh = [first[version] for version in range(NUM_UPDATES + 1)]
    assert len(set(fresh)) == NUM_UPDATES + 1
    assert {first[version] for version in range(NUM_UPDATES + 1, NUM_UPDATES + 1 + NUM_STALE_STEPS)} == {fresh[-1]}


def test_each_rank_holds_half_with_tensor_parallelism(tensor_parallel: WatchedRun) -> None:
    first, second = tensor_parallel.digests
    assert sorted(first) == sorted(second) == list(range(NUM_UPDATES + 1))
    assert not set(first.values()) & set(second.values())
    assert len(set(first.values())) == NUM_UPDATES + 1


def test_tensor_parallelism_does_not_change_the_first_rollout(
    data_parallel: WatchedRun, tensor_parallel: WatchedRun
) -> None:
    ours, theirs = data_parallel.run.files, tensor_parallel.run.files
    assert ours.series("critic/rewards/mean")[0] == theirs.series("critic/rewards/mean")[0]
    assert ours.samples("train", 1) == theirs.samples("train", 1)
    assert ours.series("response_length/mean")[0] == theirs.series("response_length/mean")[0]


def test_one_engine_is_compiled_and_the_other_is_not(data_parallel: WatchedRun, tensor_parallel: WatchedRun) -> None:
    assert (data_parallel.compiles, tensor_parallel.compiles) == (["True"] * 2, ["False"] * 2)


def test_texts_are_the_same_with_and_without_stop_texts(data_parallel: WatchedRun, tensor_parallel: WatchedRun) -> None:
    """vLLM decodes while it generates only with stop texts; otherwise the whole response is decoded at its end."""
    for whole, unstopped, stopped in data_parallel.texts + tensor_parallel.texts:
        assert whole == unstopped
        assert stopped == whole.partition(whole[len(whole) // 2])[0]
        assert len(whole) > len(stopped)


def test_generation_has_the_device_to_itself_with_everything_offloaded(
    data_parallel: WatchedRun, tensor_parallel: WatchedRun
) -> None:
    for watched, is_alone in ((data_parallel, False), (tensor_parallel, True)):
        files = watched.run.files
        cache, weights, generating, asleep = (
            files.series(f"memory/{name}_bytes_max")
            for name in ("kv_cache", "rollout_weights", "after_generate", "after_sleep")
        )
        assert len(cache) == len(differences(watched))
        for step, num_bytes in enumerate(cache):
            assert 0.9 * CACHE_BYTES < num_bytes <= CACHE_BYTES
            assert (generating[step] == num_bytes + weights[step]) is is_alone
            assert asleep[step] < CACHE_BYTES / 4


def test_nothing_is_left_in_shared_memory(tensor_parallel: WatchedRun) -> None:
    """Otherwise the next engine on this machine could not be built, and each engine would leak 25 MB."""
    assert tensor_parallel.left_in_memory == set()
