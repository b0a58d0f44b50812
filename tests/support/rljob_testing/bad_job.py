"""An example of a job that a rule refuses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Bad:
    """A job that breaks the rule, and where that is shown."""

    path: str
    edits: Mapping[str, object]
    also: tuple[str, ...] = ()
    """Other rules that the same job cannot help breaking."""
    places: tuple[str, ...] = ()
    """Where pydantic shows it, which can say more than the API server: each entry of a list; `path` where empty."""
