"""Finds the index of a process's own device, as CUDA, HIP or Ascend's runtime numbers the devices in that process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rljob_trainer.errors import ResourceError

VISIBILITY_VARIABLES: Mapping[str, tuple[str, ...]] = {
    "GPU": ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
    "NPU": ("ASCEND_RT_VISIBLE_DEVICES",),
}
"""By Ray's resource name: the variables that list the visible devices for the vendor's libraries. The position in the
list is the device's index."""


def device_number(assigned: Mapping[str, Sequence[str]], environment: Mapping[str, str]) -> int:
    """Returns the index of the first assigned device among the visible ones; 0 if no device is assigned. By default Ray
    makes only a process's own devices visible, unless RAY_EXPERIMENTAL_NOSET_*_VISIBLE_DEVICES is set.

    `assigned`: device ids by Ray's resource name, such as `{"GPU": ["3"]}`. Raises ResourceError if the assigned device
    is not visible."""
    for resource, variables in VISIBILITY_VARIABLES.items():
        if not assigned.get(resource):
            continue
        mine = assigned[resource][0]
        for variable in variables:
            if variable in environment:
                seen = [name.strip() for name in environment[variable].split(",") if name.strip()]
                if mine not in seen:
                    raise ResourceError(
                        f"{variable}: does not contain the {resource} that Ray has assigned (seen: "
                        f"{environment[variable]!r}, assigned: {mine}); do not set this variable, Ray sets it"
                    )
                return seen.index(mine)
        return int(mine)
    return 0
