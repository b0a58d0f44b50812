"""For every rule of the API, jobs that follow it and jobs that break it, written as changes of a small valid job.

Tests run the table through pydantic and through a real API server; both must give the verdict written here.
"""

from __future__ import annotations

from collections.abc import Mapping

from rljob_testing.jobs.rule_examples import (
    algorithm_examples,
    dynamic_sampling_examples,
    environment_examples,
    evaluation_examples,
    optional_roles_examples,
    placement_examples,
    pod_environment_examples,
    pods_examples,
    rewards_examples,
    training_examples,
    unions_examples,
)
from rljob_testing.jobs.valid_job import Bad

_PARTS = (
    algorithm_examples,
    dynamic_sampling_examples,
    environment_examples,
    evaluation_examples,
    optional_roles_examples,
    placement_examples,
    pod_environment_examples,
    pods_examples,
    rewards_examples,
    training_examples,
    unions_examples,
)

GOOD: dict[str, list[Mapping[str, object]]] = {name: jobs for part in _PARTS for name, jobs in part.GOOD.items()}
BAD: dict[str, list[Bad]] = {name: jobs for part in _PARTS for name, jobs in part.BAD.items()}
