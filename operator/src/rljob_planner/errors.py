"""What cannot be planned."""

from __future__ import annotations


class PlanError(Exception):
    """The text reads *where: what is wrong (value seen); what to do*."""
