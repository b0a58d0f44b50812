"""Which devices are found, without torch."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rljob_cli.devices import Devices, DeviceType, count_visible, find_devices


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with nothing on it but what the test puts there."""
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


def test_a_driver_that_fails_means_no_gpu(driver: Path) -> None:
    install(driver, "Failed to initialize NVML", exit_code=9)
    assert find_devices(None).type is DeviceType.CPU


def test_without_nvidia_smi_the_device_files_count(driver: Path, tmp_path: Path) -> None:
    assert not driver.exists()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert find_devices(None, dev_folder=tmp_path) == Devices(DeviceType.CUDA, 2)


def test_without_a_gpu_the_cores_that_may_be_used_count(driver: Path, tmp_path: Path) -> None:
    assert not driver.exists()
    assert find_devices("0", dev_folder=tmp_path) == Devices(DeviceType.CPU, len(os.sched_getaffinity(0)))


@pytest.mark.parametrize(
    ("visible", "count"),
    [("0", 1), ("0,1", 2), ("", 0), ("-1", 0), ("0,9,1", 1), ("GPU-aa,MIG-bb", 2), (" 1 , 0", 2), ("none", 0)],
)
def test_the_list_of_visible_gpus_is_read_as_cuda_does(visible: str, count: int) -> None:
    assert count_visible(visible, num_gpus=4) == count


def test_devices_are_named_for_people() -> None:
    assert [str(Devices(DeviceType.CUDA, 1)), str(Devices(DeviceType.CPU, 2))] == ["1 GPU", "2 CPU cores"]
