"""CPU threads of the workers: a user's setting counts, Ray's own default does not."""

from __future__ import annotations

import pytest
from pydantic import JsonValue

from rljob_api.contract_documents import TrainerJob
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_testing.training import training_runs
from rljob_trainer.controller.run_workers import chosen_num_threads
from rljob_trainer.settings import read_settings

FROM_A_SECRET: JsonValue = {"name": "OMP_NUM_THREADS", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}


def job(*variables: JsonValue) -> TrainerJob:
    spec = training_runs.small_job()["spec"]
    assert isinstance(spec, dict)
    return TrainerJob(name="small", spec=RLJobSpec.from_wire({**spec, "env": list(variables)}))


@pytest.mark.parametrize(
    ("environment", "variables", "expected"),
    [
        ({}, [], None),
        ({"OMP_NUM_THREADS": "4"}, [], 4),
        # Ray sets 1 in the driver of a job unless the pod has another value.
        ({"OMP_NUM_THREADS": "1", "RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"}, [], None),
        ({"OMP_NUM_THREADS": "4", "RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"}, [FROM_A_SECRET], 4),
    ],
)
def test_only_user_settings_of_threads_count(
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    variables: list[JsonValue],
    expected: int | None,
) -> None:
    for name in ("OMP_NUM_THREADS", "RAY_JOB_CONFIG_JSON_ENV_VAR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"RLJOB_SPEC": "{}"} | environment).items():
        monkeypatch.setenv(name, value)
    assert chosen_num_threads(job(*variables), read_settings()) == expected
