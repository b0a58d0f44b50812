"""Kinds of GPUs by the names that people, labels of nodes and tools give them."""

from __future__ import annotations

import pytest

from rljob_planner.errors import PlanError
from rljob_planner.gpus import KNOWN_GPUS, cpu_kind, gpu_named

GIB = 2**30


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("H100", "H100"),
        ("h100-80gb", "H100"),
        ("NVIDIA-H100-80GB-HBM3", "H100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("nvidia-h100-mega-80gb", "H100"),
        ("NVIDIA-H100-PCIe", "H100-PCIe"),
        ("NVIDIA-H100-NVL", "H100-NVL"),
        ("NVIDIA-H200", "H200"),
        ("NVIDIA-H20", "H20"),
        ("A100", "A100-80"),
        ("a100-80", "A100-80"),
        ("NVIDIA-A100-SXM4-80GB", "A100-80"),
        ("NVIDIA-A100-80GB-PCIe", "A100-80-PCIe"),
        ("NVIDIA-A100-SXM4-40GB", "A100-40"),
        ("nvidia-tesla-a100", "A100-40"),
        ("NVIDIA-L4", "L4"),
        ("NVIDIA-L40S", "L40S"),
        ("NVIDIA-A10G", "A10G"),
        ("NVIDIA-B200", "B200"),
        ("NVIDIA-GB200", "GB200"),
        ("AMD_Instinct_MI300X_OAM", "MI300X"),
    ],
)
def test_a_kind_is_found_by_any_of_its_names(name: str, kind: str) -> None:
    assert gpu_named(name).name == kind


def test_every_kind_is_found_by_its_own_name_and_has_sizes_of_a_gpu() -> None:
    for gpu in KNOWN_GPUS:
        assert gpu_named(gpu.name) is gpu
        assert 20 * GIB < gpu.memory_bytes < 200 * GIB
        assert 5e13 < gpu.flops < 3e15
        assert 2e11 < gpu.bandwidth < 1e13
        assert 3e10 < gpu.link_bandwidth < 1e12


def test_a_name_that_is_not_known_lists_those_that_are() -> None:
    with pytest.raises(PlanError, match=r"^--gpu: no GPU of this name is known \(seen 'T4'\); known are A100-40, "):
        gpu_named("T4")
    with pytest.raises(PlanError, match=r"\(seen 'H800'\); known are"):
        gpu_named("H800")
    with pytest.raises(PlanError, match=r"^node n: no GPU of this name .* or a slice, with --gpu-memory"):
        gpu_named("NVIDIA-H100-80GB-HBM3-MIG-3g.40gb", "node n")


def test_a_worker_on_cpus_is_as_fast_as_its_cores_are_many() -> None:
    one, four = cpu_kind(8 * GIB, 1), cpu_kind(8 * GIB, 4)
    assert one.is_cpu
    assert four.flops == 4 * one.flops
    assert four.memory_bytes == one.memory_bytes == 8 * GIB
