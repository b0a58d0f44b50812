"""The error of the planner."""

from __future__ import annotations


class PlanError(Exception):
    """A job, model, cluster or run cannot be planned. Messages: *where: what is wrong (value seen); what to do*."""
