"""Which device is a process's own, by the number that CUDA, HIP or Ascend's runtime give it there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rljob_trainer.errors import ResourceError

VISIBILITY_VARIABLES: Mapping[str, tuple[str, ...]] = {
    "GPU": ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
    "NPU": ("ASCEND_RT_VISIBLE_DEVICES",),
}
"""By Ray's resource: what tells a vendor's libraries which devices to show, as a list that also numbers them."""


def device_number(assigned: Mapping[str, Sequence[str]], environment: Mapping[str, str]) -> int:
    """The number of the first device that Ray has assigned, by resource, among those that the process sees; 0 without
    any. Ray shows a process its own devices only, unless RAY_EXPERIMENTAL_NOSET_*_VISIBLE_DEVICES says not to.

    Raises ResourceError for a device that the process cannot see."""
    for resource, variables in VISIBILITY_VARIABLES.items():
        if not assigned.get(resource):
            continue
        mine = assigned[resource][0]
        for variable in variables:
            if variable in environment:
                seen = [name.strip() for name in environment[variable].split(",") if name.strip()]
                if mine not in seen:
                    raise ResourceError(
                        f"{variable}: does not show the {resource} that Ray has assigned (seen: "
                        f"{environment[variable]!r}, assigned: {mine}); leave the variable to Ray"
                    )
                return seen.index(mine)
        return int(mine)
    return 0
