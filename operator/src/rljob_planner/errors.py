"""The error of the planner."""

from __future__ import annotations


class PlanError(Exception):
    """A job, model, cluster or run cannot be planned. Messages have the form *where: what is wrong (seen: value); what
    to do*."""
