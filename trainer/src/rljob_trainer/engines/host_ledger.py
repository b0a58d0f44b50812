"""Adds up and checks the host memory of a run: offloaded state, the copies from which checkpoints are written, the
state of a sleeping rollout engine. Most of it is allocated at its first use, the copies in the first save. So the check
is made earlier, while the workers are built.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from weakref import WeakMethod

import torch.distributed as dist

from rljob_trainer.errors import HostMemoryError
from rljob_trainer.host_memory import HOST_MEMORY, size_text

POOL_FIELD = "spec.pools[].resources"
"""Named in errors for memory whose size no other field changes."""


@dataclass(frozen=True)
class HostUse:
    """Host memory for one purpose."""

    owner: str
    """What it is for: `actor's moments`."""
    field: str
    """The job's field that changes its size."""
    num_bytes: int
    """Bytes when everything is allocated."""
    num_present: int = 0
    """Bytes that are allocated now."""


@dataclass(frozen=True)
class HostAccount:
    """The host memory that one process uses, by purpose, and what its host has left."""

    host: str
    uses: tuple[HostUse, ...]
    num_available: int | None
    """Bytes that can still be allocated; None: unknown, which counts as enough."""


class HostLedger:
    """The host memory of this process, by purpose. Each object with host memory adds a method that counts it."""

    def __init__(self) -> None:
        self._counts: list[WeakMethod[Callable[[], Sequence[HostUse]]]] = []

    def watch(self, count: Callable[[], Sequence[HostUse]]) -> None:
        """Adds a bound method that returns what its object uses. It is called as long as the object lives."""
        self._counts.append(WeakMethod(count))

    def account(self) -> HostAccount:
        """Returns the current account of this process."""
        counts = [count for reference in self._counts if (count := reference()) is not None]
        uses = tuple(use for count in counts for use in count() if use.num_bytes)
        return HostAccount(socket.gethostname(), uses, HOST_MEMORY.available_bytes())

    def check(self) -> None:
        """Collective. Gathers the accounts of all ranks and calls `check_accounts`."""
        account = self.account()
        accounts = [account] * dist.get_world_size()
        dist.all_gather_object(accounts, account)
        check_accounts(accounts)


HOST_LEDGER = HostLedger()
"""The one instance for this process."""


def check_accounts(accounts: Iterable[HostAccount]) -> None:
    """Raises HostMemoryError if a host has too little memory for the uses of all its processes together. The message
    lists the uses, the largest first, and begins with the field of the largest."""
    for host, processes in _by_host(accounts).items():
        uses = [use for process in processes for use in process.uses]
        needed = sum(use.num_bytes for use in uses)
        known = [each.num_available for each in processes if each.num_available is not None]
        if not known or needed <= (available := min(known) + sum(use.num_present for use in uses)):
            continue
        sums = _sums(uses)
        shares = ", ".join(f"{use.owner} {size_text(use.num_bytes)} ({use.field})" for use in sums)
        raise HostMemoryError(
            f"{sums[0].field}: host {host} has too little memory for what this run keeps there "
            f"({size_text(needed)} needed, {size_text(available)} available): {shares}; increase the memory of "
            f"the pool's pods ({POOL_FIELD}), distribute the pool over more nodes, or change one of these fields"
        )


def accounts_text(accounts: Iterable[HostAccount]) -> str:
    """The uses on each host, as one line of text."""
    sums = {host: _sums(use for each in found for use in each.uses) for host, found in _by_host(accounts).items()}
    return "; ".join(
        f"{host} {', '.join(f'{use.owner} {size_text(use.num_bytes)}' for use in uses) or 'nothing'}"
        for host, uses in sums.items()
    )


def _by_host(accounts: Iterable[HostAccount]) -> dict[str, list[HostAccount]]:
    found: dict[str, list[HostAccount]] = {}
    for account in accounts:
        found.setdefault(account.host, []).append(account)
    return found


def _sums(uses: Iterable[HostUse]) -> list[HostUse]:
    """One use for each owner, the largest first."""
    found: dict[str, HostUse] = {}
    for use in uses:
        before = found.get(use.owner)
        total = use.num_bytes + (0 if before is None else before.num_bytes)
        found[use.owner] = HostUse(use.owner, use.field, total)
    return sorted(found.values(), key=lambda use: -use.num_bytes)


def buffer_bytes(sizes: Iterable[int], *, is_pinned: bool) -> int:
    """The host memory of buffers of these sizes. torch rounds each pinned buffer up to a power of two (2.11 to 2.13,
    ATen/core/CachingHostAllocator.h). If the user sets `pinned_max_round_threshold_mb`, this is an upper bound."""
    return sum(1 << (size - 1).bit_length() if is_pinned and size else size for size in sizes)
