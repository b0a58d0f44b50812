"""Which devices a process sees, and the index of its own."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from rljob_trainer.errors import ResourceError
from rljob_trainer.groups.devices import CUDA_VARIABLE, device_number, visible_devices


@pytest.mark.parametrize(
    ("assigned", "environment", "number"),
    [
        ({}, {}, 0),
        ({"GPU": []}, {"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"GPU": ["5"]}, {"CUDA_VISIBLE_DEVICES": "5"}, 0),
        # Ray was configured to hide nothing.
        ({"GPU": ["5"]}, {}, 5),
        ({"GPU": ["5"]}, {"CUDA_VISIBLE_DEVICES": "4,5,6"}, 1),
        ({"GPU": ["GPU-77"]}, {"CUDA_VISIBLE_DEVICES": "GPU-76, GPU-77"}, 1),
        ({"GPU": ["MIG-1"]}, {"CUDA_VISIBLE_DEVICES": "MIG-1"}, 0),
        ({"GPU": ["3"]}, {"HIP_VISIBLE_DEVICES": "2,3"}, 1),
        ({"GPU": [], "NPU": ["7"]}, {"ASCEND_RT_VISIBLE_DEVICES": "7"}, 0),
        ({"NPU": ["7"]}, {"ASCEND_RT_VISIBLE_DEVICES": "6,7"}, 1),
        # Ray keeps the space of a list such as `4, 5`.
        ({"GPU": [" 5"]}, {"CUDA_VISIBLE_DEVICES": "4, 5"}, 1),
        # The list of another vendor is ignored.
        ({"NPU": ["7"]}, {"CUDA_VISIBLE_DEVICES": "0"}, 7),
    ],
)
def test_the_device_is_found_among_the_visible_ones(
    assigned: Mapping[str, list[str]], environment: Mapping[str, str], number: int
) -> None:
    assert device_number(assigned, environment) == number


def test_a_hidden_device_is_named() -> None:
    with pytest.raises(ResourceError, match=r"CUDA_VISIBLE_DEVICES: .*\(seen: '0,1', assigned: 5\)"):
        device_number({"GPU": ["5"]}, {"CUDA_VISIBLE_DEVICES": "0,1"})


@pytest.mark.parametrize(
    ("assigned", "at_start", "now", "visible", "number"),
    [
        # The variable was not set outside: all GPUs of the node.
        (["3"], None, "3", None, 3),
        (["5"], ["4", "5", "6", "7"], "5", "4,5,6,7", 1),
        # Ranks of another pool on the same node see the same GPUs, and have other numbers.
        (["7"], ["4", "5", "6", "7"], "7", "4,5,6,7", 3),
        (["GPU-77"], ["GPU-76", "GPU-77"], "GPU-77", "GPU-76,GPU-77", 1),
        (["5", "4"], ["4", "5", "6"], "4,5", "4,5,6", 1),
        # CUDA can use only one MIG device in a process.
        (["MIG-2"], ["MIG-1", "MIG-2"], "MIG-2", "MIG-2", 0),
        # Ray was configured to hide nothing.
        (["5"], ["4", "5"], "4,5", "4,5", 1),
        (["3"], None, None, None, 3),
        # No GPU is assigned.
        ([], None, None, None, 0),
        ([], [], "", "", 0),
    ],
)
def test_a_process_sees_all_gpus_of_its_node(
    assigned: list[str], at_start: list[str] | None, now: str | None, visible: str | None, number: int
) -> None:
    assert visible_devices(assigned, at_start, now) == visible
    environment = {} if visible is None else {CUDA_VARIABLE: visible}
    assert device_number({"GPU": assigned}, environment) == number


def test_a_list_for_another_vendors_gpus_is_left_alone() -> None:
    # Ray has set HIP_VISIBLE_DEVICES=1; `at_start` is the value of that variable.
    assert visible_devices(["1"], ["0", "1"], "0,1") == "0,1"
    assert visible_devices(["1"], ["0", "1"], None) is None
