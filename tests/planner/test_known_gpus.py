"""GPU types by the names that people, node labels and tools give them."""

from __future__ import annotations

import pytest

from rljob_planner.errors import PlanError
from rljob_planner.gpus import KNOWN_GPUS, cpu_worker, gpu_named

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
def test_a_gpu_type_is_found_by_any_of_its_names(name: str, kind: str) -> None:
    assert gpu_named(name).name == kind


def test_every_gpu_type_is_found_by_its_name_and_has_plausible_numbers() -> None:
    for gpu in KNOWN_GPUS:
        assert gpu_named(gpu.name) is gpu
        assert 20 * GIB < gpu.memory_bytes < 200 * GIB
        assert 5e13 < gpu.flops < 3e15
        assert 2e11 < gpu.bandwidth < 1e13
        assert 3e10 < gpu.link_bandwidth < 1e12


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(PlanError, match=r"^--gpu: unknown GPU type \(seen 'T4'\); use one of A100-40, "):
        gpu_named("T4")
    with pytest.raises(PlanError, match=r"\(seen 'H800'\); use one of"):
        gpu_named("H800")
    with pytest.raises(PlanError, match=r"^node n: unknown GPU type .* slice, with --gpu-memory"):
        gpu_named("NVIDIA-H100-80GB-HBM3-MIG-3g.40gb", "node n")


def test_the_speed_of_a_cpu_worker_grows_with_its_cores() -> None:
    one, four = cpu_worker(8 * GIB, 1), cpu_worker(8 * GIB, 4)
    assert one.is_cpu
    assert four.flops == 4 * one.flops
    assert four.memory_bytes == one.memory_bytes == 8 * GIB
