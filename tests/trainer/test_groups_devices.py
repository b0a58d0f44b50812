"""The index of a process's own device."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from rljob_trainer.errors import ResourceError
from rljob_trainer.groups.devices import device_number


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
