"""Job files with an environment: their resolved form, and modules that a class must not have."""

from __future__ import annotations

import pytest
from ruamel.yaml import YAML

from rljob_api.errors import JobFileError
from rljob_api.job_file import load_job_text, load_job_text_to_run, resolved_job_text
from rljob_testing.messages import Mentions

JOB = """\
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata: {name: games}
spec:
  pools: [{name: main}]
  training:
    steps: 2
    batchSize: 2
    model: {source: owner/model}
    rollout: {maxNewTokens: 64}
    environment:
      type: Class
      classes: [{path: "my_games:Guess"}]
      maxContextTokens: 1024
"""


def test_the_resolved_job_has_the_failure_policies_of_the_environments_reward_but_no_process_limits() -> None:
    job = load_job_text(JOB + "    rewards: [{type: Environment, onTimeout: Score, errorScore: -1}]\n")
    text = resolved_job_text(job.metadata, job.spec)
    [reward] = YAML(typ="safe", pure=True).load(text)["spec"]["training"]["rewards"]
    policies = {"onError": "Fail", "onTimeout": "Score", "errorScore": -1}
    assert reward == {"name": "score", "weight": 1, "type": "Environment", **policies}
    assert load_job_text(text).spec.training.environment == job.spec.training.environment


def test_the_resolved_job_also_has_no_dataset_and_no_rewards_if_the_job_has_none() -> None:
    job = load_job_text(JOB + "    evaluations: [{}]\n")
    training = load_job_text(resolved_job_text(job.metadata, job.spec)).spec.training
    assert (training.dataset, training.rewards) == (None, ())
    assert training.evaluations == job.spec.training.evaluations


def test_a_class_in_a_module_with_a_name_of_the_standard_library_is_rejected_before_a_run() -> None:
    text = JOB.replace("my_games", "queue")
    assert load_job_text(text)
    with pytest.raises(JobFileError) as caught:
        load_job_text_to_run(text, "job.yaml")
    [problem] = caught.value.problems
    assert (problem.path, problem.line) == ("spec.training.environment.classes[0].path", 13)
    assert problem.message == Mentions("standard library, 'queue'", "rename the file", "my_queue")
