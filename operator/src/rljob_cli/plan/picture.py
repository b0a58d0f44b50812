"""`rljob plan`: who is on which GPUs, as a small picture.

```
main  1 node x 8 H100
  actor     [0 1 2 3 4 5 6 7]              a copy on 8 GPUs
  rollout   [0 1][2 3][4 5][6 7]           4 engines, each on 2 GPUs
```
"""

from __future__ import annotations

from collections.abc import Iterator

from rljob_planner.placement import PlacedPool, Placement, TrainLayout
from rljob_planner.workload import Role, Workload

_WIDTH = 48
_MAX_NUMBERS = 8
"""GPUs of a box that are numbered one by one."""


def picture(placement: Placement, workload: Workload) -> Iterator[str]:
    """Lines, without an end of line."""
    rows = [
        (pool, role, _boxes(pool.num_gpus, _gpus_of_copy(pool, role)), _words(pool, role, workload))
        for pool in placement.pools
        for role in pool.roles
    ]
    role_width = max((len(role.value) for _, role, _, _ in rows), default=0)
    box_width = max((len(boxes) for _, _, boxes, _ in rows), default=0)
    for pool in placement.pools:
        yield f"{pool.name}  {_count(pool.nodes, 'node')} x {pool.gpus_per_node} {pool.gpu.name}"
        for owner, role, boxes, words in rows:
            if owner is pool:
                yield f"  {role.value:{role_width}}  {boxes:{box_width}}  {words}"


def _gpus_of_copy(pool: PlacedPool, role: Role) -> int:
    if role is Role.ROLLOUT:
        assert pool.rollout is not None, "a pool with this role has its layout"
        return pool.rollout.tensor_parallel
    return pool.layouts[role].shard_size


def _boxes(num_gpus: int, size: int) -> str:
    """A box for each copy, with the numbers of its GPUs; in wide ones the first and the last of them, and of many boxes
    the first ones and the last."""
    num_boxes = num_gpus // size
    for is_short in (False, True):
        boxes = [_box(at * size, size, is_short=is_short) for at in range(num_boxes)]
        if sum(map(len, boxes)) <= _WIDTH:
            return "".join(boxes)
    shown = next(num for num in range(1, num_boxes + 1) if sum(map(len, boxes[: num + 1])) > _WIDTH - 10)
    return f"{''.join(boxes[:shown])} ... {boxes[-1]}"


def _box(first: int, size: int, *, is_short: bool) -> str:
    if size > _MAX_NUMBERS or (is_short and size > 1):
        return f"[{first}-{first + size - 1}]"
    return f"[{' '.join(str(first + at) for at in range(size))}]"


def _words(pool: PlacedPool, role: Role, workload: Workload) -> str:
    size = _gpus_of_copy(pool, role)
    num = pool.num_gpus // size
    if role is Role.ROLLOUT:
        return f"{_count(num, 'engine')}{', each' if num > 1 else ''} on {_count(size, _noun(pool))}"
    model = workload.models.get(role)
    if model is not None and model.is_actor_without_adapters:
        return "the actor without its adapters"
    copies = "a copy" if num == 1 else f"{num} copies, each"
    return f"{copies} on {_count(size, _noun(pool))}{_shares(pool.layouts[role])}"


def _shares(layout: TrainLayout) -> str:
    return "" if layout.sequence_parallel == 1 else f", {layout.sequence_parallel} share rows"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _noun(pool: PlacedPool) -> str:
    return "worker" if pool.gpu.is_cpu else "GPU"
