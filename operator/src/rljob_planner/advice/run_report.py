"""All that is said of a run: predicted beside measured, what it shows, what to change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rljob_planner.advice.comparison import ComparedMemory, ComparedTime
from rljob_planner.advice.run_facts import RunFacts
from rljob_planner.advice.timeline_facts import TimelineFacts
from rljob_planner.advice.tuning import Advice, Finding
from rljob_planner.plan import Plan


@dataclass(frozen=True)
class RunReport:
    """Of one run."""

    name: str
    """Its folder."""
    state: str
    """Where it is, as its folder says; empty where that is not known."""
    constants: str
    """Where the constants of the prediction are from."""
    facts: RunFacts
    plan: Plan
    """Of the job with the lengths that the run had."""
    times: tuple[ComparedTime, ...]
    memory: tuple[ComparedMemory, ...]
    timelines: Mapping[int, TimelineFacts]
    findings: tuple[Finding, ...]
    advice: tuple[Advice, ...]
    """Each for itself."""
    together: tuple[Advice, ...]
    """One after the other."""
