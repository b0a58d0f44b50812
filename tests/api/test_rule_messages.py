"""The message for a value that a rule rejects: the entry and the value, and names of the job where they help."""

from __future__ import annotations

import json
import re

import pytest

from rljob_api.errors import JobFileError
from rljob_api.job_file import load_job_text
from rljob_api.scalars import PATTERN_MESSAGES
from rljob_api.v1alpha1.job import RLJob
from rljob_api.yaml_text import to_yaml
from rljob_testing.jobs.valid_job import valid_job

T = "spec.training."
SECOND = {"spec.pools[1]": {"name": "second"}}
Words = tuple[str, ...]
CASES: dict[str, tuple[dict[str, object], dict[str, Words]]] = {
    "no KV cache": (
        {T + "rollout.cpuKvCache": "0Gi"},
        {"spec.training.rollout.cpuKvCache": ("above 0", '(seen: "0Gi")', "1Gi")},
    ),
    "a buffer that is too long": (
        {T + "rewards[1]": {"name": "length", "type": "Overlong", "overlong": {"bufferTokens": 65}}},
        {"spec.training.rewards[1].overlong.bufferTokens": ("at most rollout.maxNewTokens", "(seen: 65)", "reduce")},
    ),
    "rewards without names": (
        {T + "rewards[1]": {"type": "MathAnswer", "weight": 0.5}},
        {f"spec.training.rewards[{index}].name": ("same name", '(seen: "score")', "different") for index in (0, 1)},
    ),
    "a pool without a role": (SECOND, {"spec.pools[1].name": ("no role", '(seen: "second")', "remove")}),
    "a mistyped pool": (
        {**SECOND, "spec.roles": {"critic": {"pool": "secnd"}}, T + "algorithm.type": "PPO"},
        {"spec.roles.critic.pool": ("name of a pool", '(seen: "secnd")', "(main, second)")},
    ),
    "dynamic sampling without groups": (
        {T + "algorithm": {"type": "PPO", "dynamicSampling": {}}},
        {
            "spec.training.algorithm.dynamicSampling": (
                "advantage that compares responses",
                "{enabled: false}",
                "advantage.type: GroupRelative",
            )
        },
    ),
    "another type's block": (
        {T + "rewards[0]": {"type": "Function", "format": {"pattern": "a"}}},
        {
            "spec.training.rewards[0].function": ("required", "type Function", "add it"),
            "spec.training.rewards[0].format": ("ignored", "type is not Format", "remove it"),
        },
    ),
    "fields of services that score responses": (
        {
            T + "rewards": [
                {
                    "name": "judge",
                    "type": "Judge",
                    "judge": {
                        "url": "judge:8000/v1",
                        "model": "m",
                        "rubric": "How good is it?",
                        "pattern": "Score: .*",
                        "scale": [5, 1],
                        "keyVariable": "judge key",
                    },
                },
                {"name": "remote", "type": "Remote", "remote": {"url": "http://me:word@scores"}},
            ]
        },
        {
            "spec.training.rewards[0].judge.url": ("http or https URL", "start it with http:// or https://"),
            "spec.training.rewards[0].judge.rubric": ("must contain {response}", "./rubric.txt", "start the path with"),
            "spec.training.rewards[0].judge.pattern": ("exactly one group", "it has 0"),
            "spec.training.rewards[0].judge.scale": ("must be the smallest and the largest number, such as [1, 5]",),
            "spec.training.rewards[0].judge.keyVariable": ("must be the name of an environment variable",),
            "spec.training.rewards[1].remote.url": ("must not contain a user or a password", "Secret"),
        },
    ),
    "names of resources": (
        {"spec.head.resources": {"limits": {"gpu": 1, "Memory": 1, "disk": 1}}},
        {
            "spec.head.resources.limits.gpu": ("must name a resource", '(seen: "gpu")', "gpusPerNode"),
            "spec.head.resources.limits.Memory": ("must name a resource", '(seen: "Memory")', "did you mean memory?"),
            "spec.head.resources.limits.disk": (
                "must name a resource",
                '(seen: "disk")',
                "cpu, memory, ephemeral-storage",
            ),
        },
    ),
    "a label of Kueue": (
        {"spec.head.template.labels": {"kueue.x-k8s.io/queue-name": "a"}},
        {
            "spec.head.template.labels.kueue.x-k8s.io/queue-name": (
                "must not set",
                "prefixes rljob.dev/, ray.io/, kueue.x-k8s.io/",
                '(seen: "kueue.x-k8s.io/queue-name")',
                "another key",
                "belong in metadata.labels of the job",
            )
        },
    ),
    "a volume without a type": (
        {"spec.volumes[0]": {"name": "data", "mountPath": "/data"}},
        {"spec.volumes[0].type": ("required", "one of PersistentVolumeClaim, ConfigMap, Secret, EmptyDir")},
    ),
    "a claim without a name": (
        {"spec.checkpoint.storage": {"persistentVolumeClaim": ""}},
        {"spec.checkpoint.storage.persistentVolumeClaim": ("not be empty", "set the name of a PersistentVolumeClaim")},
    ),
    "an annotation that is not taken": (
        {"spec.head.template.annotations": {"controller.kubernetes.io/pod-deletion-cost": "10"}},
        {
            "spec.head.template.annotations.controller.kubernetes.io/pod-deletion-cost": (
                "not supported",
                '(seen: "controller.kubernetes.io/pod-deletion-cost")',
                "remove",
            )
        },
    ),
    "huge pages": (
        {"spec.head.resources": {"limits": {"hugepages-2Mi": "3Mi", "memory": "1Gi"}}},
        {"spec.head.resources.limits.hugepages-2Mi": ("multiple of the page size", '(seen: "3Mi")', "4Mi")},
    ),
    "an offloaded reference that is the actor": (
        {T + "model": {"source": "owner/model", "lora": {}, "offload": {"reference": True}}},
        {"spec.training.model.offload.reference": ("model.lora", "(seen: true)", "remove", "offload.parameters")},
    ),
    "a critic's warmup that is too long": (
        {T + "algorithm.type": "PPO", T + "critic.warmupSteps": 50},
        {"spec.training.critic.warmupSteps": ("below training.steps", "(seen: 50)", "reduce")},
    ),
    "a profiled step after the last": (
        {T + "profile": {"steps": [1, 11]}, T + "timelineSteps": [12]},
        {
            "spec.training.profile.steps[1]": (
                "at most training.steps",
                "(seen: 11)",
                "remove",
                "(training.steps: 10)",
            ),
            "spec.training.timelineSteps[0]": (
                "at most training.steps",
                "(seen: 12)",
                "remove",
                "(training.steps: 10)",
            ),
        },
    ),
    "a place for no reference": (
        {"spec.roles.ref.pool": "main"},
        {"spec.roles.ref.pool": ("ignored", "kl.coefficient is 0", '(seen: "main")', "above 0", "ref_logprobs")},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_message_names_entry_and_value(name: str) -> None:
    edits, expected = CASES[name]
    with pytest.raises(JobFileError) as caught:
        load_job_text(to_yaml(valid_job(edits)))
    found = {problem.path: problem.message for problem in caught.value.problems}
    assert len(caught.value.problems) == len(found)
    assert found.keys() == expected.keys()
    for path, words in expected.items():
        assert [word for word in words if word not in found[path]] == [], found[path]


def test_an_unknown_resource_without_a_similar_name_gets_no_suggestion() -> None:
    with pytest.raises(JobFileError) as caught:
        load_job_text(to_yaml(valid_job({"spec.head.resources": {"limits": {"disk": 1}}})))
    assert "did you mean" not in str(caught.value)
    assert "gpusPerNode" not in str(caught.value)


LOSS = T + "algorithm.loss.clipped"
MEMORY = "spec.head.resources.requests.memory"


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (MEMORY, True, ("quantity", "16Gi", "(seen: true)")),
        (MEMORY, [1], ("quantity", "16Gi", "(seen: a list with 1 entry)")),
        (MEMORY, {"Gi": 1}, ("quantity", "16Gi", "(seen: a mapping)")),
        (MEMORY, -1.5, ("quantity", "not negative", "(seen: -1.5)")),
        (MEMORY, 1e100, ("quantity", "16Gi", "(seen: 1e+100)")),
        (LOSS, {"clipRatioHigh": 1e39}, ("at most 1000000000000", "(seen: 1e+39)", "reduce")),
        (T + "algorithm.entropyCoefficient", -1e39, ("at least -1000000000000", "(seen: -1e+39)", "increase")),
        (T + "optimizer.epsilon", 1e-46, ("at least 1e-30", "(seen: 1e-46)", "increase")),
        (T + "rewards[0].timeoutSeconds", 1e9, ("at most 1000000", "(seen: 1000000000.0)", "reduce")),
        (MEMORY, 1.5, ("a string", "(seen: 1.5)", "in quotes")),
        (T + "rollout.cpuKvCache", False, ("quantity", "(seen: false)")),
        ("spec.image", ["a"], ("a string", "(seen: a list with 1 entry)", "single value")),
        ("spec.image", {"a": "b"}, ("a string", "(seen: a mapping)", "single value")),
        ("spec.pools[0].template.nodeSelector", {"gpu": True}, ("a string", "(seen: true)", "in quotes")),
        ("metadata.namespace", "Team", ("lower case", "team-a", '(seen: "Team")')),
        ("spec.env", [{"name": "1A", "value": "a"}], ("environment variable", "LOG_LEVEL", '(seen: "1A")')),
        ("spec.rayVersion", "2.54", ("release", "2.54.0", '(seen: "2.54")')),
    ],
)
def test_advice_of_an_error_leads_to_a_valid_value(path: str, value: object, words: Words) -> None:
    with pytest.raises(JobFileError) as caught:
        load_job_text(to_yaml(valid_job({path: value})))
    [problem] = caught.value.problems
    assert problem.path.startswith(path)
    assert [word for word in words if word not in problem.message] == [], problem.message


def test_an_address_with_a_password_is_rejected_without_showing_it() -> None:
    tracker = {"type": "MLflow", "mlflow": {"trackingUri": "https://me:hidden-word@host"}}
    with pytest.raises(JobFileError) as caught:
        load_job_text(to_yaml(valid_job({T + "trackers": [tracker]})))
    [problem] = caught.value.problems
    assert problem.path == T + "trackers[0].mlflow.trackingUri"
    assert "MLFLOW_TRACKING_USERNAME" in problem.message
    assert "hidden-word" not in problem.message
    assert "hidden-word" not in str(caught.value)


def test_every_string_pattern_has_a_description() -> None:
    schema = json.dumps(RLJob.model_json_schema())
    patterns = {json.loads(found) for found in re.findall(r'"pattern": ("(?:[^"\\\\]|\\\\.)*")', schema)}
    assert patterns
    assert patterns <= PATTERN_MESSAGES.keys()
