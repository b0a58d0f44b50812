"""What a person reads who wrote what a rule refuses: the entry and the value, and names of the job where some help."""

from __future__ import annotations

import json
import re

import pytest

from rljob_api.errors import JobFileError
from rljob_api.job_file import load_job_text
from rljob_api.scalars import FORMS
from rljob_api.v1alpha1.job import RLJob
from rljob_api.yaml_text import to_yaml
from rljob_testing.jobs.valid_job import valid_job

T = "spec.training."
SECOND = {"spec.pools[1]": {"name": "second"}}
CASES: dict[str, tuple[dict[str, object], list[str]]] = {
    "no KV cache": (
        {T + "rollout.cpuKvCache": "0Gi"},
        [
            "spec.training.rollout.cpuKvCache: must be above 0: an engine without a KV cache generates nothing "
            '(seen: "0Gi"); write some memory, such as 1Gi (the default), or leave it out'
        ],
    ),
    "a buffer that is too long": (
        {T + "rewards[1]": {"name": "length", "type": "Overlong", "overlong": {"bufferTokens": 65}}},
        [
            "spec.training.rewards[1].overlong.bufferTokens: overlong.bufferTokens must not be more than "
            "rollout.maxNewTokens (seen: 65); lower it, or raise maxNewTokens"
        ],
    ),
    "rewards without names": (
        {T + "rewards[1]": {"type": "MathAnswer", "weight": 0.5}},
        [
            f'spec.training.rewards[{index}].name: two entries have the same name (seen: "score"); give each a name of '
            "its own (without one an entry is called score)"
            for index in (0, 1)
        ],
    ),
    "a pool without a role": (
        SECOND,
        [
            "spec.pools[1].name: there is a pool without a role, whose GPUs would stay idle"
            ' (seen: "second"); remove it, or put a role there'
        ],
    ),
    "a mistyped pool": (
        {**SECOND, "spec.roles": {"critic": {"pool": "secnd"}}, T + "algorithm.type": "PPO"},
        [
            'spec.roles.critic.pool: there is no pool of this name (seen: "secnd"); leave it out for the first, or '
            "name one of spec.pools (main, second)"
        ],
    ),
    "dynamic sampling without groups": (
        {T + "algorithm": {"type": "PPO", "dynamicSampling": {}}},
        [
            "spec.training.algorithm.dynamicSampling: dynamicSampling replaces groups with equal scores, and the job's "
            "advantage (algorithm.advantage.type, or that of the recipe algorithm.type) compares no groups: it learns "
            "from equal scores, too; remove it (with type: DAPO write dynamicSampling: {enabled: false}), or choose an "
            "advantage.type that does, such as GroupRelative"
        ],
    ),
    "another type's block": (
        {T + "rewards[0]": {"type": "Function", "format": {"pattern": "a"}}},
        [
            "spec.training.rewards[0].function: `type: Function` needs this block; add it, or choose another type",
            "spec.training.rewards[0].format: is ignored, because `type` is not Format; remove it, or write `type: "
            "Format`",
        ],
    ),
    "names of resources": (
        {"spec.head.resources": {"limits": {"gpu": 1, "Memory": 1, "disk": 1}}},
        [
            f'spec.head.resources.limits.{name}: names a resource that a container cannot request (seen: "1"); write'
            " cpu, memory, ephemeral-storage, hugepages-2Mi or the like, or the name of a device with its domain, such"
            f" as rdma/hca (not kubernetes.io){meant}"
            for name, meant in (
                ("gpu", " (for GPUs use gpusPerNode and gpuResource of the pool)"),
                ("Memory", " (did you mean memory?)"),
                ("disk", ""),
            )
        ],
    ),
    "an annotation that is not taken": (
        {"spec.head.template.annotations": {"controller.kubernetes.io/pod-deletion-cost": "10"}},
        [
            "spec.head.template.annotations.controller.kubernetes.io/pod-deletion-cost: RLJob does not take annotations"
            ' for seccomp, mirror pods, deletion costs and alpha tolerations (seen: "10"); remove it'
        ],
    ),
    "huge pages": (
        {"spec.head.resources": {"limits": {"hugepages-2Mi": "3Mi", "memory": "1Gi"}}},
        [
            "spec.head.resources.limits.hugepages-2Mi: an amount of huge pages must be a multiple of the page"
            ' (seen: "3Mi"); write a multiple, such as 4Mi of hugepages-2Mi'
        ],
    ),
    "a place for no reference": (
        {"spec.roles.ref.pool": "main"},
        [
            "spec.roles.ref.pool: there is no reference model with training.algorithm.kl.coefficient 0, and its pool "
            'would be ignored (seen: "main"); remove it, or set a coefficient above 0 (or choose a function that needs '
            "ref_logprobs)"
        ],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_message(name: str) -> None:
    edits, expected = CASES[name]
    with pytest.raises(JobFileError) as caught:
        load_job_text(to_yaml(valid_job(edits)))
    found = [f"{problem.path}: {problem.message}" for problem in caught.value.problems]
    assert sorted(found) == sorted(expected)


LOSS = T + "algorithm.loss.clipped"
MEMORY = "spec.head.resources.requests.memory"
QUANTITY = (
    "must be a quantity such as 500m, 2, 1.5, 1e3 or 16Gi, and not negative (seen: {}); write a number, then nothing"
)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (MEMORY, True, QUANTITY.format("true")),
        (MEMORY, [1], QUANTITY.format("a list of 1")),
        (MEMORY, {"Gi": 1}, QUANTITY.format("a mapping")),
        (MEMORY, -1.5, QUANTITY.format("-1.5")),
        (MEMORY, 1e100, QUANTITY.format("1e+100")),
        (LOSS, {"clipRatioHigh": 1e39}, "must be at most 1000000000000 (seen: 1e+39); lower it"),
        (T + "algorithm.entropyCoefficient", -1e39, "must be at least -1000000000000 (seen: -1e+39); raise it"),
        (T + "optimizer.epsilon", 1e-46, "must be at least 1e-30 (seen: 1e-46); raise it"),
        (T + "rewards[0].timeoutSeconds", 1e9, "must be at most 1000000 (seen: 1000000000.0); lower it"),
        (MEMORY, 1.5, "must be text (seen: 1.5); put it in quotes"),
        (T + "rollout.cpuKvCache", False, QUANTITY.format("false")),
        ("spec.image", ["a"], "must be text (seen: a list of 1); write one value"),
        ("spec.image", {"a": "b"}, "must be text (seen: a mapping); write one value"),
        ("spec.pools[0].template.nodeSelector", {"gpu": True}, "must be text (seen: true); put it in quotes"),
        ("metadata.namespace", "Team", "must be a name of lower case letters, digits and '-', such as team-a"),
        ("spec.env", [{"name": "1A", "value": "a"}], "must be the name of an environment variable, such as LOG_LEVEL"),
        ("spec.rayVersion", "2.54", 'must be a release such as 2.54.0 (seen: "2.54")'),
    ],
)
def test_advice_of_an_error_leads_to_a_valid_value(path: str, value: object, message: str) -> None:
    with pytest.raises(JobFileError) as caught:
        load_job_text(to_yaml(valid_job({path: value})))
    [problem] = caught.value.problems
    assert problem.path.startswith(path)
    assert problem.message.startswith(message)


def test_every_string_pattern_has_a_description() -> None:
    schema = json.dumps(RLJob.model_json_schema())
    patterns = {json.loads(found) for found in re.findall(r'"pattern": ("(?:[^"\\\\]|\\\\.)*")', schema)}
    assert patterns
    assert patterns <= FORMS.keys()
