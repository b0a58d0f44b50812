"""Which devices a process sees, and which of them is its own.

Ray assigns a device to each worker process and makes only this device visible. On NVIDIA GPUs this is too little: ranks
that share a model in vLLM look up each other's GPUs by number, and open each other's memory. For them `visible_devices`
makes all GPUs of the node visible again, and `device_number` finds the process's own device among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rljob_trainer.errors import ResourceError

CUDA_VARIABLE = "CUDA_VISIBLE_DEVICES"
"""The variable that lists the NVIDIA GPUs which a process sees, such as `2,3`. Unset: all GPUs."""
MIG_PREFIX = "MIG-"
"""The beginning of the id of a MIG device, which is a part of a GPU."""
VISIBILITY_VARIABLES: Mapping[str, tuple[str, ...]] = {
    "GPU": (CUDA_VARIABLE, "HIP_VISIBLE_DEVICES"),
    "NPU": ("ASCEND_RT_VISIBLE_DEVICES",),
}
"""Ray's resource name -> the environment variables that list the devices which the vendor's libraries can see, such as
`2,3`. A device's index is its position in this list, from 0."""


def device_number(assigned: Mapping[str, Sequence[str]], environment: Mapping[str, str]) -> int:
    """Returns the index of the first assigned device among the visible ones, as the vendor's library (CUDA, HIP,
    Ascend's runtime) numbers them in this process; if no variable limits which devices are visible, its id; 0 if no
    device is assigned.

    `assigned`: device ids by Ray's resource name, such as `{"GPU": ["3"]}`. `environment`: the variables of the
    process. Raises ResourceError if the assigned device is not visible."""
    for resource, variables in VISIBILITY_VARIABLES.items():
        if not assigned.get(resource):
            continue
        device_id = assigned[resource][0].strip()
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


def visible_devices(assigned: Sequence[str], at_start: Sequence[str] | None, now: str | None) -> str | None:
    """Returns the value that CUDA_VISIBLE_DEVICES must have, so that the process sees all GPUs of its node which its
    Ray node manages: the value at the start of the process, before Ray changed it. None: the variable must not be set.

    Returns the current value if Ray has not set the variable: no GPU is assigned, the GPUs are another vendor's, or
    RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES is set. Also returns it for MIG devices that Ray knows by their ids,
    because CUDA can use only one of them in a process.

    `assigned`: Ray's ids of the assigned GPUs. `at_start`: the entries of the variable at the start of the process;
    None: it was not set. `now`: its current value."""
    is_set_by_ray = now is not None and set(now.split(",")) == set(assigned)
    if not is_set_by_ray or any(device_id.startswith(MIG_PREFIX) for device_id in assigned):
        return now
    return None if at_start is None else ",".join(at_start)
