"""The error of the planner."""

from __future__ import annotations


class PlanError(Exception):
    """A job, model, cluster or run cannot be planned. Messages name the place, say what is wrong and which value was
    seen, and give advice: `WHERE: must be at most 8 (seen 9); reduce it`."""
