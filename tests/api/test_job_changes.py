"""Values that `--set` and `--name` change: typed by the schema, and reported with the option instead of a line."""

from __future__ import annotations

import pytest

from rljob_api.errors import JobFileError
from rljob_api.job_changes import read_change, renamed
from rljob_api.job_file import cluster_problems, job_text_warnings, load_job_text_to_run
from rljob_api.v1alpha1.job import RLJob

JOB = """\
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata: {name: small}
spec:
  pools:
  - {name: main, nodes: 1, gpusPerNode: 1}
  - {name: other, nodes: 2, gpusPerNode: 1}
  roles: {ref: {pool: other}}
  image: repository/image:1
  training:
    algorithm: {kl: {coefficient: 0.1}}
    steps: 3
    batchSize: 4
    model: {source: some/model}
    dataset: {type: File, file: {path: rows.jsonl}}
    rewards: [{type: MathAnswer}]
    rollout: {groupSize: 2}
"""


def changed(*texts: str) -> RLJob:
    return load_job_text_to_run(JOB, "job.yaml", [read_change(text) for text in texts])


def problems(*texts: str) -> list[str]:
    with pytest.raises(JobFileError) as raised:
        changed(*texts)
    return str(raised.value).splitlines()


def test_values_have_the_type_of_their_field() -> None:
    job = changed(
        "spec.training.steps=12",
        "spec.image=1.0",
        "spec.training.optimizer.learningRate=1e-5",
        "spec.training.timelineSteps=[1, 2]",
        "metadata.labels[kueue.x-k8s.io/queue-name]=010",
        "metadata.labels.team=no",
    )
    assert (job.spec.training.steps, job.spec.image) == (12, "1.0")
    assert job.spec.training.optimizer.learning_rate == 1e-5
    assert job.spec.training.timeline_steps == (1, 2)
    assert job.metadata.labels == {"kueue.x-k8s.io/queue-name": "010", "team": "no"}


def test_an_entry_of_a_list_is_given_by_its_index_or_its_name() -> None:
    job = changed("spec.pools[other].nodes=5", "spec.pools[0].gpusPerNode=2")
    assert [(pool.nodes, pool.gpus_per_node) for pool in job.spec.pools] == [(1, 2), (5, 1)]


def test_blocks_that_the_file_does_not_have_are_added_and_null_removes_a_field() -> None:
    job = changed("spec.runPolicy.maxAppRetries=7", "spec.image=null", "spec.training.model.lora.rank=8")
    assert job.spec.run_policy.max_app_retries == 7
    assert job.spec.image is None
    assert job.spec.training.model.lora is not None


def test_the_last_of_several_changes_of_a_field_counts() -> None:
    job = load_job_text_to_run(JOB, "job.yaml", [read_change("spec.training.steps=5"), renamed("other")])
    assert (job.spec.training.steps, job.metadata.name) == (5, "other")
    assert load_job_text_to_run(JOB, "job.yaml", [renamed("null")]).metadata.name == "null"
    assert changed("spec.training.steps=5", "spec.training.steps=6").spec.training.steps == 6


@pytest.mark.parametrize(
    ("path", "nearest"),
    [
        ("training.steps", "spec.training.steps"),
        ("spec.training.stepps", "spec.training.steps"),
        ("steps", "spec.training.steps"),
        ("spec.training.maxNewTokens", "spec.training.rollout.maxNewTokens"),
        ("spec.pools[main].node", "spec.pools[NAME].nodes"),
        ("spec.training.steps.more", "spec.training.steps"),
        ("spec", "spec."),
        ("status.phase", "metadata."),
        ("spec..training", "spec.training"),
    ],
)
def test_a_wrong_path_names_the_nearest_one(path: str, nearest: str) -> None:
    [problem] = problems(f"{path}=1")
    assert problem.startswith(f"--set: {path}: is not a field of a job; did you mean {nearest}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("spec.training.steps", "must have the form PATH=VALUE (seen: 'spec.training.steps')"),
        ("=3", "must have the form PATH=VALUE (seen: '=3')"),
        ("spec.pools[big].nodes=3", "spec.pools has no entry big; use one of: main, other"),
        ("spec.pools[7].nodes=3", "spec.pools has no entry 7"),
        ("spec.pools[" + "1" * 5000 + "].nodes=3", "spec.pools has no entry 111"),
        ("spec.envFrom[0].prefix=A", "the file has no entries in spec.envFrom; set the whole list"),
        ("spec.pools[0]=null", "spec.pools[0]: cannot be removed; set the whole list, as in 'spec.pools=[...]'"),
        ("kind=Job", "kind: cannot be changed"),
        ("spec.training.rewards=[", "spec.training.rewards: "),
        ("spec.training.steps=many", 'spec.training.steps: must be a whole number (seen: "many")'),
        ("spec.training.steps=", 'spec.training.steps: must be a whole number (seen: "")'),
        ("spec.training.steps=010", "spec.training.steps: "),
        ("spec.training.steps=0", "spec.training.steps: 0 steps need evaluations (seen: 0)"),
        ("spec.training.loss.tpye=1", "spec.training.loss.tpye: is not a field of a job; did you mean"),
        ("spec.pools=[{name: main}, {name: main, gpus: 1}]", "spec.pools[1].gpus: is not a known field"),
    ],
)
def test_a_wrong_value_is_reported_with_the_option(change: str, message: str) -> None:
    first = problems(change)[0]
    assert first.startswith("--set: ")
    assert message in first


def test_problems_of_the_file_keep_their_lines() -> None:
    found = problems("spec.training.steps=many", "spec.pools[0].nodes=0")
    assert [problem.partition(": ")[0] for problem in found] == ["--set", "--set"]
    with pytest.raises(JobFileError) as raised:
        load_job_text_to_run(JOB.replace("batchSize: 4", "batchSize: x"), "job.yaml", [renamed("Wrong Name")])
    assert [problem.line for problem in raised.value.problems] == [13]
    with pytest.raises(JobFileError, match=r"^--name: metadata.name: must have at most 46 lower case letters"):
        load_job_text_to_run(JOB, "job.yaml", [renamed("Wrong Name")])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n", "job.yaml:1:1: must be a mapping"),
        ("", "job.yaml:1:1: the file is empty"),
        (JOB.replace("rollout: {groupSize: 2}", "rollout: 2"), "--set: spec.training.rollout.groupSize: the value of"),
    ],
)
def test_a_change_hides_no_fault_of_the_file(text: str, message: str) -> None:
    with pytest.raises(JobFileError) as raised:
        load_job_text_to_run(text, "job.yaml", [read_change("spec.training.rollout.groupSize=4")])
    assert str(raised.value).startswith(message)
    assert (
        load_job_text_to_run(
            JOB.replace("rollout: {groupSize: 2}", "rollout:"),
            "job.yaml",
            [read_change("spec.training.rollout.groupSize=4")],
        ).spec.training.rollout.group_size
        == 4
    )


def test_a_value_in_a_secret_variable_is_not_shown() -> None:
    [problem] = problems("spec.env=[{name: API_TOKEN, value: [hidden]}]")
    assert "hidden" not in problem


def test_warnings_about_changed_values_name_the_option() -> None:
    change = read_change("spec.head.resources.requests.memory=400m")
    job = load_job_text_to_run(JOB, "job.yaml", [change])
    [warning] = job_text_warnings(JOB, job, [change])
    assert (warning.option, warning.line) == ("--set", None)
    storage = cluster_problems(JOB, job, [change])
    assert [problem.option for problem in storage] == [""]
