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
