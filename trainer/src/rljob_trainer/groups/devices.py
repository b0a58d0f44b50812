"""Finds the index of the device that Ray has assigned to a process, as the vendor's library (CUDA, HIP, Ascend's
runtime) numbers the devices in that process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rljob_trainer.errors import ResourceError

VISIBILITY_VARIABLES: Mapping[str, tuple[str, ...]] = {
    "GPU": ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
    "NPU": ("ASCEND_RT_VISIBLE_DEVICES",),
}
"""Ray's resource name -> the environment variables that list the devices which the vendor's libraries can see, such as
`2,3`. A device's index is its position in this list, from 0."""


def device_number(assigned: Mapping[str, Sequence[str]], environment: Mapping[str, str]) -> int:
    """Returns the index of the first assigned device among the visible ones; if no variable limits which devices are
    visible, its id; 0 if no device is assigned. Ray makes only a process's assigned devices visible, unless
    RAY_EXPERIMENTAL_NOSET_*_VISIBLE_DEVICES is set.

    `assigned`: device ids by Ray's resource name, such as `{"GPU": ["3"]}`. `environment`: the variables of the
    process. Raises ResourceError if the assigned device is not visible."""
    for resource, variables in VISIBILITY_VARIABLES.items():
        if not assigned.get(resource):
            continue
        device_id = assigned[resource][0]
        for variable in variables:
            if variable in environment:
                visible = [name.strip() for name in environment[variable].split(",") if name.strip()]
                if device_id not in visible:
                    raise ResourceError(
                        f"{variable}: does not contain the {resource} that Ray has assigned (seen: "
                        f"{environment[variable]!r}, assigned: {device_id}); do not set this variable, Ray sets it"
                    )
                return visible.index(device_id)
        return int(device_id)
    return 0
