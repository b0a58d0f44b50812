"""What a job needs only on a cluster, and settings without effect."""

from __future__ import annotations

import pytest

from rljob_api.job_checks import cluster_violations, is_ray_new_enough, job_warnings
from rljob_api.job_file import job_text_warnings, load_job_text
from rljob_api.v1alpha1.job import RLJob
from rljob_api.v1alpha1.pools import PRIORITY_CLASS_LABEL, QUEUE_LABEL
from rljob_api.yaml_text import to_yaml, wire_path
from rljob_testing.jobs.valid_job import valid_job
from rljob_testing.messages import Mentions
from rljob_testing.operator import inputs


@pytest.mark.parametrize(
    ("version", "is_new_enough"),
    [
        ("2.53.99", False),
        ("2.54.0", True),
        ("2.100.0", True),
        ("3.0.0", True),
        ("1.99.9", False),
        ("2.54", False),
        ("2.60.0rc1", False),
        ("newest", False),
        ("", False),
    ],
)
def test_versions_of_ray_are_parsed(version: str, is_new_enough: bool) -> None:
    assert is_ray_new_enough(version) is is_new_enough


def test_an_old_ray_is_rejected_on_a_cluster() -> None:
    (found,) = cluster_violations(inputs.spec({"rayVersion": "2.53.0"}), has_default_image=True)
    assert found.path == ("spec", "rayVersion")
    for words in ("at least 2.54.0", "without a token", "(seen: 2.53.0)", "newer Ray"):
        assert words in found.message
    for version in ("2.54.0", "2.61.1"):
        assert cluster_violations(inputs.spec({"rayVersion": version}), has_default_image=True) == ()


@pytest.mark.parametrize(
    ("allowed", "advice"),
    [
        ((), '(seen: "s3-reader"); remove it, or ask the administrator'),
        (("s3-writer", "reader"), "use one of s3-writer, reader, or ask the administrator"),
    ],
)
def test_a_service_account_that_the_installation_does_not_list_is_rejected(
    allowed: tuple[str, ...], advice: str
) -> None:
    spec = inputs.spec({"serviceAccountName": "s3-reader"})
    (found,) = cluster_violations(spec, has_default_image=True, service_account_names=allowed)
    assert found.path == ("spec", "serviceAccountName")
    assert found.message == Mentions("may not use this ServiceAccount", advice, "jobs.serviceAccountNames")
    names = ("s3-reader", *allowed)
    assert cluster_violations(spec, has_default_image=True, service_account_names=names) == ()
    assert cluster_violations(spec, has_default_image=True) == ()


@pytest.mark.parametrize(
    ("edits", "path"),
    [
        ({"scheduling": {"labels": {"example.com/queue": "a"}}}, "spec.scheduling.labels.example.com/queue"),
        (
            {"pools[0].template": {"labels": {"kai.scheduler/queue": "a"}}},
            "spec.pools[0].template.labels.kai.scheduler/queue",
        ),
        (
            {"head.template": {"labels": {"scheduling.x-k8s.io/pod-group": "of-another-job"}}},
            "spec.head.template.labels.scheduling.x-k8s.io/pod-group",
        ),
        (
            {"head.template": {"annotations": {"scheduling.volcano.sh/queue-name": "a"}}},
            "spec.head.template.annotations.scheduling.volcano.sh/queue-name",
        ),
    ],
)
def test_labels_and_annotations_of_schedulers_need_a_prefix_that_the_installation_allows(
    edits: dict[str, object], path: str
) -> None:
    spec = inputs.spec(edits)
    [found] = cluster_violations(spec, has_default_image=True, allowed_label_prefixes=("volcano.sh/",))
    assert wire_path(found.path) == path
    assert found.message == Mentions("does not allow this", "(allowed prefixes: volcano.sh/)", str(found.path[-1]))
    assert cluster_violations(spec, has_default_image=True, allowed_label_prefixes=None) == ()
    prefixes = ("scheduling.", "kai.scheduler/", "example.com/")
    assert cluster_violations(spec, has_default_image=True, allowed_label_prefixes=prefixes) == ()


def test_other_labels_and_annotations_of_pods_need_no_permission() -> None:
    labels = {"team": "a", "azure.workload.identity/use": "true", "notvolcano.sh/queue": "a"}
    template = {"labels": labels, "annotations": {"k8s.v1.cni.cncf.io/networks": "rdma"}}
    spec = inputs.spec({"pools[0].template": template, "head.template": template})
    assert cluster_violations(spec, has_default_image=True, allowed_label_prefixes=()) == ()


_MATH = {"name": "maths", "type": "MathAnswer"}
_SHORT = {"name": "length", "type": "Overlong", "overlong": {"bufferTokens": 16}}
_JUDGE = {
    "name": "style",
    "type": "Judge",
    "judge": {
        "url": "http://judge/v1",
        "model": "m",
        "rubric": "{response}",
        "pattern": "(.)",
        "labels": {"good": 2, "bad": -1},
    },
}
_FUNCTION = {"name": "own", "type": "Function", "function": {"path": "my_rewards:score"}}
_NAMED = {"name": "most", "type": "File", "file": {"path": "train.jsonl"}, "rewards": ["maths"]}
_RARE = _NAMED | {"name": "rare", "weight": 1e-9}
MIN = {"spec.checkpoint.keepBest": {"metric": "eval/heldout/excluded_fraction", "mode": "Min"}}
_EVALUATION = {"dataset": {"type": "File", "file": {"path": "held_out.jsonl"}, "maxPromptTokens": 64}}


@pytest.mark.parametrize(
    ("edits", "expected"),
    [
        (
            {"profile": {"steps": [1], "ranks": [0, 2, 1, 7]}},
            {
                "spec.training.profile.ranks[1]": Mentions("no effect", "2 workers", "(seen: 2)", "remove it"),
                "spec.training.profile.ranks[3]": Mentions("no effect", "2 workers", "(seen: 7)", "remove it"),
            },
        ),
        (
            {"model.headDtype": "Float32", "model.dtype": "Float32"},
            {"spec.training.model.headDtype": Mentions("no effect", "dtype: Float32", "Float32", "BFloat16")},
        ),
        ({"model.headDtype": "Float32"}, {}),
        ({"model.headDtype": "Float32", "model.dtype": "BFloat16"}, {}),
        ({"model.dtype": "Float32", "profile": {"steps": [1], "ranks": [1]}}, {}),
        (
            {"rewards": [_MATH | {"weight": 0.8}, _SHORT], "evaluations": [_EVALUATION]},
            {
                "spec.training.evaluations[0].passThreshold": Mentions(
                    "pass_at_k is always 0", "score is 0.8", "seen: 1"
                )
            },
        ),
        ({"rewards": [_MATH | {"weight": 0.8}], "evaluations": [_EVALUATION | {"passThreshold": 0.8}]}, {}),
        ({"rewards": [_MATH | {"weight": 0.8}], "evaluations": [_EVALUATION | {"numSamples": 0}]}, {}),
        # All weights are 0 in this evaluation, so each counts as 1.
        (
            {
                "rewards": [_MATH | {"weight": 0}, _JUDGE | {"weight": 0.5}],
                "evaluations": [_EVALUATION | {"rewards": ["maths"]}],
            },
            {},
        ),
        ({"rewards": [_MATH | {"weight": 0.8}, _JUDGE], "evaluations": [_EVALUATION]}, {}),
        (
            {"rewards": [_FUNCTION | {"function": {"path": "a:b", "batchSize": 8}}]},
            {"spec.training.rewards[0].function.batchSize": Mentions("no effect", "takes: Response", "(seen: 8)")},
        ),
        ({"rewards": [_FUNCTION | {"function": {"path": "a:b", "batchSize": 8, "takes": "Batch"}}]}, {}),
        (
            {"dataset": None, "datasets": [_NAMED, _RARE], "rewards": [_MATH, _SHORT]},
            {
                "spec.training.rewards[1].name": Mentions("scores no response", f"(seen: {_SHORT['name']})"),
                "spec.training.datasets[1].weight": Mentions("draws no prompt", "(seen: 1e-09)"),
            },
        ),
        ({"dataset": None, "datasets": [_NAMED], "rewards": [_MATH]}, {}),
        ({"rewards": [_MATH | {"weight": 0.8}, _FUNCTION | {"weight": 0.1}], "evaluations": [_EVALUATION]}, {}),
        (
            {"promptSampling": {"passThreshold": 0.5}},
            {"spec.training.promptSampling.passThreshold": Mentions("no effect", "type: Uniform", "(seen: 0.5)")},
        ),
        (
            {"rewards": [_MATH | {"weight": 0.8}], "promptSampling": {"type": "PassRate"}},
            {"spec.training.promptSampling.passThreshold": Mentions("drawn rarely", "score is 0.8", "(seen: 1)")},
        ),
        ({"rewards": [_MATH | {"weight": 0.8}], "promptSampling": {"type": "PassRate", "passThreshold": 0.8}}, {}),
        ({"rewards": [_FUNCTION | {"weight": 0.8}], "promptSampling": {"type": "PassRate"}}, {}),
        # One of the datasets has a reward that reaches the threshold.
        (
            {
                "dataset": None,
                "datasets": [_NAMED, _NAMED | {"name": "short", "rewards": [_SHORT["name"]]}],
                "rewards": [_MATH, _SHORT],
                "promptSampling": {"type": "PassRate"},
            },
            {},
        ),
    ],
)
def test_settings_of_the_training_without_effect_get_a_warning(
    edits: dict[str, object], expected: dict[str, object]
) -> None:
    job = RLJob.from_wire(valid_job({f"spec.training.{name}": value for name, value in edits.items()}))
    assert {wire_path(found.path): found.message for found in job_warnings(job)} == expected


def test_settings_of_the_best_checkpoint_without_sense_get_a_warning() -> None:
    best = {"metric": "eval/heldout/excluded_fraction"}
    edits = {"spec.training.evaluations": [_EVALUATION], "spec.checkpoint.keepBest": best}
    [found] = job_warnings(RLJob.from_wire(valid_job(edits)))
    assert found.message == Mentions("most responses without a score", "mode: Min")
    edits |= {"spec.training.steps": 0, "spec.training.optimizer.warmupSteps": 0}
    [found] = job_warnings(RLJob.from_wire(valid_job(edits)))
    assert (wire_path(found.path), found.message) == ("spec.checkpoint.keepBest", Mentions("no effect with 0 steps"))
    assert list(job_warnings(RLJob.from_wire(valid_job({**edits, "spec.training.steps": 5, **MIN})))) == []


def test_a_password_in_a_url_gets_a_warning_that_does_not_repeat_it() -> None:
    lines = (
        "  env:",
        "  - {name: PROXY, value: 'http://user:canary-1@proxy:3128'}",
        "  - {name: TRACKER, value: 'https://tracker.example.com:8443/a@b'}",
        "  - {name: DATABASE, value: 'postgresql+asyncpg://:canary-2@db/runs'}",
    )
    text = to_yaml(valid_job()) + "\n".join(lines) + "\n"
    found = job_text_warnings(text, load_job_text(text))
    assert [problem.path for problem in found] == ["spec.env[0].value", "spec.env[2].value"]
    for problem in found:
        assert problem.message == Mentions("password", "everybody who may read the job", "secretKeyRef", "envFrom")
        assert problem.hides_line
    assert "canary" not in str(found)


@pytest.mark.parametrize(
    ("labels", "is_warned"),
    [
        ({PRIORITY_CLASS_LABEL: "high"}, True),
        ({PRIORITY_CLASS_LABEL: "high", QUEUE_LABEL: "team"}, False),
        ({QUEUE_LABEL: "team"}, False),
    ],
)
def test_a_priority_without_a_queue_gets_a_warning(labels: dict[str, str], is_warned: bool) -> None:
    job = RLJob.from_wire(valid_job({"metadata.labels": labels}))
    found = {wire_path(warning.path): warning.message for warning in job_warnings(job)}
    advice = Mentions("no effect without the label", QUEUE_LABEL, '(seen: "high")', "set")
    assert found == ({f"metadata.labels.{PRIORITY_CLASS_LABEL}": advice} if is_warned else {})
