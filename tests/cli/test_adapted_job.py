"""A job written for a cluster is adapted to this machine: which devices it has (found without torch), and what changes
in the job."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rljob_api.job_file import load_job_text
from rljob_api.v1alpha1.job import RLJob
from rljob_cli.devices import Devices, DeviceType, count_visible, find_devices
from rljob_cli.errors import LocalPlanError
from rljob_cli.local.adapted_job import plan_for_machine, plan_for_ray_cluster
from rljob_testing.messages import Mentions

TWO_CORES = Devices(DeviceType.CPU, 2)
FOUR_GPUS = Devices(DeviceType.CUDA, 4)


def job(
    spec: str = "",
    pools: str = "[{name: main, nodes: 2, gpusPerNode: 8}]",
    training: str = "",
    model: str = "source: some/model",
) -> RLJob:
    return load_job_text(
        f"""\
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata: {{name: small}}
spec:
  pools: {pools}
{spec}
  training:
    steps: 3
    batchSize: 48
    model: {{{model}}}
    dataset: {{type: File, file: {{path: rows.jsonl}}}}
    rewards: [{{type: MathAnswer}}]
{training}
"""
    )


@pytest.mark.parametrize(
    ("devices", "num_workers", "expected"),
    [
        (TWO_CORES, None, 2),
        (FOUR_GPUS, None, 4),
        (Devices(DeviceType.CUDA, 100), None, 16),
        (TWO_CORES, 1, 1),
        (TWO_CORES, 4, 4),
        (FOUR_GPUS, 3, 3),
    ],
)
def test_workers_are_the_smaller_of_pool_and_devices(devices: Devices, num_workers: int | None, expected: int) -> None:
    mapping = plan_for_machine(job(), devices, num_workers)
    assert [(row.pool, row.roles, row.num_workers_in_file, row.num_workers) for row in mapping.pools] == [
        ("main", ("actor", "rollout"), 16, expected)
    ]
    assert [(pool.name, pool.nodes, pool.gpus_per_node) for pool in mapping.spec.pools] == [("main", 1, expected)]
    assert mapping.spec.training == job().spec.training


def test_optional_roles_are_shown_only_for_jobs_that_have_them() -> None:
    with_kl = job(training="    algorithm: {type: PPO, kl: {coefficient: 0.1}}")
    assert [row.roles for row in plan_for_machine(with_kl, TWO_CORES, None).pools] == [
        ("actor", "rollout", "ref", "critic")
    ]


def test_batches_that_no_longer_divide_are_rejected() -> None:
    with pytest.raises(LocalPlanError, match=r"main: 16 -> 5") as caught:
        plan_for_machine(job(), Devices(DeviceType.CPU, 5), None)
    assert "batchSize" in str(caught.value)
    assert "--workers" in str(caught.value)


def test_tensor_parallel_peers_need_their_own_responses() -> None:
    # 1 prompt with 8 responses is enough for 2 replicas of 8 workers, and too little for 16 workers.
    small = job("  roles: {rollout: {tensorParallel: 2}}", "[{name: main, gpusPerNode: 8}]", "    miniBatchSize: 1")
    assert plan_for_machine(small, TWO_CORES, 8).pools[0].num_workers == 8
    with pytest.raises(
        LocalPlanError, match=r"spec\.training\.miniBatchSize: .* by the number of GPUs of the actor.s pool"
    ):
        plan_for_machine(small, TWO_CORES, 16)


def test_layouts_for_more_workers_than_available_are_shrunk() -> None:
    actor = "{shardSize: 4, sequenceParallel: 2, deferGradientReduction: true}"
    roles = f"  roles: {{rollout: {{tensorParallel: 4}}, actor: {actor}, ref: {{shardSize: 8}}}}"
    kl = "    algorithm: {kl: {coefficient: 0.1}}"
    plan = plan_for_machine(job(roles, "[{name: main, gpusPerNode: 8}]", kl), TWO_CORES, None)
    assert plan.spec.roles.rollout.tensor_parallel == 2
    assert (plan.spec.roles.actor.shard_size, plan.spec.roles.actor.sequence_parallel) == (2, 2)
    assert plan.spec.roles.actor.defer_gradient_reduction is True
    assert (plan.spec.roles.ref.shard_size, plan.spec.roles.ref.sequence_parallel) == (2, None)
    assert plan.notes == (
        Mentions("roles.actor.shardSize: 2 instead of 4", "workers of the pool (2)"),
        Mentions("roles.rollout.tensorParallel: 2 instead of 4", "workers of the pool (2)"),
        Mentions("roles.ref.shardSize: 2 instead of 8", "workers of the pool (2)"),
    )


def test_a_replica_for_more_workers_than_available_takes_all_of_them() -> None:
    pools, model = "[{name: main, gpusPerNode: 8}]", "source: some/model, offload: {gradients: true}"
    plan = plan_for_machine(job("  roles: {actor: {shardSize: 8}}", pools, model=model), TWO_CORES, 3)
    assert plan.spec.roles.actor.shard_size == 3
    assert plan.notes == (Mentions("roles.actor.shardSize: 3 instead of 8", "workers of the pool (3)"),)


def test_more_workers_than_gpus_are_rejected() -> None:
    with pytest.raises(LocalPlanError, match=r"6 workers .*4 GPUs.*--workers 4"):
        plan_for_machine(job(), FOUR_GPUS, 6)


def test_more_workers_than_one_node_may_have_are_rejected() -> None:
    with pytest.raises(LocalPlanError, match=r"--workers.*64 .*96"):
        plan_for_machine(job(), TWO_CORES, 96)


def test_settings_that_need_a_cluster_are_reported_once_each() -> None:
    spec = """\
  image: example/trainer
  rayVersion: 2.60.0
  head: {resources: {requests: {cpu: 2}}}
  env:
  - {name: PLAIN, value: "1"}
  - {name: HF_TOKEN, valueFrom: {secretKeyRef: {name: hub, key: token}}}
  envFrom: [{secretRef: {name: all-keys}}]
  imagePullSecrets: [{name: pull}]
  serviceAccountName: cloud
  volumes:
  - {name: data, mountPath: /data, type: PersistentVolumeClaim, persistentVolumeClaim: {claimName: data}}
  code: {configMap: my-code}
  checkpoint: {storage: {persistentVolumeClaim: ckpt}}
  runPolicy: {activeDeadlineSeconds: 60, provisioningDeadlineSeconds: 60, cleanup: KeepCluster}
"""
    pools = "[{name: main, gpusPerNode: 2, sharedMemory: 16Gi, template: {labels: {a: b}}}]"
    notes = plan_for_machine(job(spec, pools), TWO_CORES, None).notes
    assert [note.split(": ")[0] for note in notes] == [
        "image example/trainer",
        "rayVersion 2.60.0",
        "head",
        "pools main",
        "env HF_TOKEN",
        "envFrom all-keys",
        "imagePullSecrets pull",
        "serviceAccountName cloud",
        "volumes data",
        "code",
        "checkpoint.storage ckpt",
        "runPolicy",
    ]
    assert notes[3] == Mentions("sharedMemory, template", "ignored")
    assert notes[-1] == Mentions("activeDeadlineSeconds, cleanup", "ignored")


def test_profiled_workers_that_do_not_exist_here_get_a_note() -> None:
    def notes(ranks: str) -> tuple[str, ...]:
        profiled = job(pools="[{name: main, gpusPerNode: 4}]", training=f"    profile: {{steps: [1], ranks: {ranks}}}")
        return plan_for_machine(profiled, TWO_CORES, None).notes

    assert notes("[0, 1]") == ()
    assert notes("[0, 2, 3]") == (Mentions("training.profile.ranks: 2, 3 ignored", "2 workers"),)


def test_a_job_for_one_machine_needs_no_notes() -> None:
    assert plan_for_machine(job(pools="[{name: main, gpusPerNode: 2}]"), TWO_CORES, None).notes == ()


def test_the_device_deadline_applies_on_one_machine_too() -> None:
    waits = job("  runPolicy: {provisioningDeadlineSeconds: 60}", "[{name: main, gpusPerNode: 2}]")
    assert plan_for_machine(waits, TWO_CORES, None).notes == ()


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with only the programs that the test puts there."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path / "nvidia-smi"


def install(driver: Path, lines: str, exit_code: int = 0) -> None:
    driver.write_text(f"#!/bin/sh\nprintf '{lines}'\nexit {exit_code}\n")
    driver.chmod(0o755)


def test_gpus_are_those_that_the_driver_lists(driver: Path) -> None:
    install(driver, "GPU 0: NVIDIA H200 (UUID: GPU-1)\\n  MIG 3g.40gb Device 0\\nGPU 1: NVIDIA H200 (UUID: GPU-2)\\n")
    assert find_devices(None) == Devices(DeviceType.CUDA, 2)


def test_hidden_gpus_do_not_count(driver: Path) -> None:
    install(driver, "GPU 0: a\\nGPU 1: b\\n")
    assert find_devices("1") == Devices(DeviceType.CUDA, 1)
    assert find_devices("").type is DeviceType.CPU


def test_a_failing_driver_means_no_gpu(driver: Path) -> None:
    install(driver, "Failed to initialize NVML", exit_code=9)
    assert find_devices(None).type is DeviceType.CPU


def test_without_nvidia_smi_the_device_files_count(driver: Path, tmp_path: Path) -> None:
    assert not driver.exists()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert find_devices(None, dev_folder=tmp_path) == Devices(DeviceType.CUDA, 2)


def test_without_a_gpu_the_usable_cores_count(driver: Path, tmp_path: Path) -> None:
    assert not driver.exists()
    assert find_devices("0", dev_folder=tmp_path) == Devices(DeviceType.CPU, len(os.sched_getaffinity(0)))


@pytest.mark.parametrize(
    ("visible", "count"),
    [("0", 1), ("0,1", 2), ("", 0), ("-1", 0), ("0,9,1", 1), ("GPU-aa,MIG-bb", 2), (" 1 , 0", 2), ("none", 0)],
)
def test_the_list_of_visible_gpus_is_parsed_as_cuda_does(visible: str, count: int) -> None:
    assert count_visible(visible, num_gpus=4) == count


def test_devices_have_readable_names() -> None:
    assert [str(Devices(DeviceType.CUDA, 1)), str(Devices(DeviceType.CPU, 2))] == ["1 GPU", "2 CPU cores"]


def test_a_bucket_is_used_only_on_request() -> None:
    on_bucket = job("  checkpoint: {storage: {s3: {bucket: team-checkpoints}}}", "[{name: main, gpusPerNode: 2}]")
    plan = plan_for_machine(on_bucket, TWO_CORES, None)
    assert plan.spec.checkpoint.storage is None
    assert plan.notes == (Mentions("checkpoint.storage s3://team-checkpoints", "not used", "run's folder", "--bucket"),)
    for used in (
        plan_for_machine(on_bucket, TWO_CORES, None, uses_bucket=True),
        plan_for_ray_cluster(on_bucket, uses_bucket=True),
    ):
        assert used.spec.checkpoint.storage == on_bucket.spec.checkpoint.storage
        assert used.notes == ()
    assert plan_for_ray_cluster(on_bucket).spec.checkpoint.storage is None
    on_claim = job("  checkpoint: {storage: {persistentVolumeClaim: ckpt}}")
    for without in (job(), on_claim):
        with pytest.raises(LocalPlanError, match=r"--bucket: the job has no checkpoint\.storage\.s3"):
            plan_for_machine(without, TWO_CORES, None, uses_bucket=True)
