"""The GPU types that `rljob plan` gives to the pools of a job."""

from __future__ import annotations

from rljob_api.v1alpha1.job import RLJob
from rljob_cli.plan.gpus import pool_gpus
from rljob_cli.plan.options import GpuOptions
from rljob_testing.jobs.valid_job import valid_job


def test_mig_devices_are_recognized_by_their_resource() -> None:
    edits = {
        "spec.pools[0].gpuResource": "nvidia.com/mig-3g.40gb",
        "spec.pools[1]": {"name": "other"},
        "spec.roles.ref.pool": "other",
        "spec.training.algorithm.kl.coefficient": 0.1,
    }
    found = pool_gpus(RLJob.from_wire(valid_job(edits)).spec, GpuOptions(gpu_types=("H100",)))
    assert {name: gpu.is_mig_device for name, gpu in found.gpus.items()} == {"main": True, "other": False}
    assert all(group.gpu.is_mig_device for group in found.cluster)
    found = pool_gpus(RLJob.from_wire(valid_job()).spec, GpuOptions(gpu_types=("H100",)))
    assert not any(gpu.is_mig_device for gpu in found.gpus.values())
