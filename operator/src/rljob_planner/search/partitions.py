"""All ways to group roles. A set of roles is a number whose bit `i` says whether role `i` is in it."""

from __future__ import annotations

from collections.abc import Iterator

RoleSet = int
"""Bits of roles."""


def members(roles: RoleSet) -> tuple[int, ...]:
    """The numbers of its roles, ascending."""
    return tuple(number for number in range(roles.bit_length()) if roles >> number & 1)


def set_partitions(roles: RoleSet) -> Iterator[tuple[RoleSet, ...]]:
    """Each way to split these roles into sets that are not empty, once: 1, 2, 5, 15, 52 for one to five roles (Bell's
    numbers). Those with fewer sets come before their refinements; the lowest role is in the first set."""
    if roles == 0:
        yield ()
        return
    lowest = roles & -roles
    others = roles ^ lowest
    beside = others
    while True:
        for rest in set_partitions(others ^ beside):
            yield (lowest | beside, *rest)
        if beside == 0:
            return
        beside = (beside - 1) & others
