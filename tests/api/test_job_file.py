"""Job files: what is read, what is rejected, and the message and line of the error."""

from __future__ import annotations

from pathlib import Path

import pytest
from ruamel.yaml import YAML

from rljob_api.errors import ContractError, JobFileError, Problem
from rljob_api.job_file import load_job_file, load_job_text, load_job_text_to_run, resolved_job_text
from rljob_api.v1alpha1.advantage import AdvantageType
from rljob_api.v1alpha1.algorithm import AlgorithmType
from rljob_api.v1alpha1.policy_loss import LossType

JOB = """\
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata: {name: example}
spec:
  pools:
  - name: main
    gpusPerNode: 2
  training:
    model: {source: owner/model}
    dataset:
      type: File
      file: {path: train.jsonl}
    rewards: [{type: MathAnswer}]
    steps: 10
    optimizer:
      learningRate: 1e-6
"""


DATASETS = "File, HuggingFace, ReasoningGym"
RECIPES = ", ".join(AlgorithmType)
ADVANTAGES = ", ".join(AdvantageType)


Words = tuple[str, ...]


def assert_words(message: str, *words: str) -> None:
    """Asserts that all words are in the message."""
    assert [word for word in words if word not in message] == [], message


def problems(text: str) -> list[Problem]:
    with pytest.raises(JobFileError) as caught:
        load_job_text(text, "job.yaml")
    return list(caught.value.problems)


def only_problem(text: str) -> tuple[int | None, int | None, str, str]:
    (problem,) = problems(text)
    return problem.line, problem.column, problem.path, problem.message


def scalar_problem(value: str) -> tuple[int | None, int | None, str, str]:
    """The problem with a value written after `image: `, on line 17."""
    return only_problem(JOB + f"  image: {value}\n")


def test_a_job_is_read_with_numbers_of_yaml_1_2() -> None:
    job = load_job_text(JOB)
    assert job.spec.training.optimizer.learning_rate == 0.000001
    assert job.spec.pools[0].gpus_per_node == 2
    assert job.spec.training.rollout.group_size == 8


@pytest.mark.parametrize(
    ("written", "value"),
    [("2", 2.0), ("+2.5", 2.5), (".5", 0.5), ("1e2", 100.0), ("1E+2", 100.0), ("0x10", 16.0), ("3.", 3.0)],
)
def test_numbers_are_read(written: str, value: float) -> None:
    assert load_job_text(JOB.replace("1e-6", written)).spec.training.optimizer.learning_rate == value


def test_every_problem_is_reported_with_its_path_in_the_order_of_the_file() -> None:
    text = JOB.replace("gpusPerNode: 2", 'gpusPerNode: "2"').replace("1e-6", "-1").replace("steps: 10", "stepz: 10")
    assert [(p.line, p.column, p.path) for p in problems(text)] == [
        (7, 18, "spec.pools[0].gpusPerNode"),
        (8, 3, "spec.training.steps"),
        (14, 5, "spec.training.stepz"),
        (16, 21, "spec.training.optimizer.learningRate"),
    ]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("gpusPerNode: 2", 'gpusPerNode: "2"', ("a whole number", '(seen: "2")', "without quotes")),
        ("gpusPerNode: 2", "gpusPerNode: 1.5", ("a whole number", "(seen: 1.5)", "decimals")),
        ("gpusPerNode: 2", "gpusPerNode: 65", ("at most 64", "(seen: 65)", "reduce")),
        ("1e-6", "0", ("above 0", "(seen: 0)", "increase")),
        ("1e-6", '"1e-6"', ("must be a number", '(seen: "1e-6")', "without quotes")),
        ("1e-6", "1e999", ("a finite number", "(seen: 1e999)")),
        ("type: File", "type: file", (f"one of {DATASETS}", '(seen: "file")', "did you mean File?")),
        ("type: File", "type: 3", (f"one of {DATASETS}", "(seen: 3)", "choose one of them")),
        ("{type: MathAnswer}", "MathAnswer", ("a mapping", '(seen: "MathAnswer")', "fields")),
        ("source: owner/model", "source: 3", ("a string", "(seen: 3)", "in quotes")),
        ("source: owner/model", "source: ''", ("must not be empty", '(seen: "")', "set a value")),
        ("steps: 10", "steps: 10\n    profile: {steps: []}", ("at least 1 entry", "(seen: an empty list)", "add")),
        ("[{type: MathAnswer}]", "[]", ("at least one reward is required", "add a reward")),
        (
            "{type: MathAnswer}",
            "{type: MathAnswer, name: a/b}",
            ("letters, digits, '-' and '_'", '(seen: "a/b")', "start it with a letter"),
        ),
        (
            "{type: MathAnswer}",
            "{type: Format, format: {pattern: '<think>(.*'}}",
            ("regular expression", "missing ), unterminated subpattern at position 7", '(seen: "<think>(.*")'),
        ),
        (
            "v1alpha1",
            "v1",
            ("rljob.dev/v1alpha1", '(seen: "rljob.dev/v1")', "write rljob.dev/v1alpha1"),
        ),
        ("learningRate", "learning_rate", ("not a known field", "did you mean learningRate?")),
        ("steps: 10", "steps: 10\n    batchsize: 3", ("not a known field", "did you mean batchSize?")),
        ("{name: example}", "{name: Example}", ("at most 46", "lower case", '(seen: "Example")', "simpler name")),
    ],
)
def test_messages_name_the_mistake_the_value_and_the_fix(old: str, new: str, words: Words) -> None:
    assert old in JOB
    _, _, _, message = only_problem(JOB.replace(old, new))
    assert_words(message, *words)


def test_an_unknown_field_without_a_similar_name_lists_the_known_names() -> None:
    _, _, path, message = only_problem(JOB.replace("{type: MathAnswer}", "{type: MathAnswer, zzz: 1}"))
    assert path == "spec.training.rewards[0].zzz"
    known = "code, errorScore, format, function, judge, name, numProcesses, onError, onTimeout, overlong, remote"
    assert_words(message, "not a known field", f"{known}, rewardModel, timeoutSeconds, type, weight")


@pytest.mark.parametrize(
    ("algorithm", "path", "words"),
    [
        ("{type: A2C}", "type", (f"one of {RECIPES}", '(seen: "A2C")', "choose one of them")),
        ("{type: DPO}", "type", (f"one of {RECIPES}", '(seen: "DPO")', "choose one of them")),
        ("{type: drgrpo}", "type", (f"one of {RECIPES}", '(seen: "drgrpo")', "did you mean DrGRPO?")),
        ("{advantage: {type: RLOO}}", "advantage.type", (f"one of {ADVANTAGES}", '(seen: "RLOO")', "choose one")),
        (
            "{type: RLOO, advantage: {groupRelative: {}}}",
            "advantage.groupRelative",
            ("ignored", "not GroupRelative", "remove the block `groupRelative`", "advantage.type: GroupRelative"),
        ),
        (
            "{advantage: {type: GAE, gae: {lambda: 1.5}}}",
            "advantage.gae.lambda",
            ("at most 1", "(seen: 1.5)", "reduce"),
        ),
        (
            "{loss: {type: Cliped}}",
            "loss.type",
            (f"one of {', '.join(LossType)}", '(seen: "Cliped")', "did you mean Clipped?"),
        ),
        (
            "{loss: {type: Function, function: {path: mine}}}",
            "loss.function.path",
            ("my_rewards:score", '(seen: "mine")', "':' before", "without .py"),
        ),
        (
            "{loss: {type: Function, function: {path: 'mine:own'}, clipped: {clipRatioLow: 0.1}}}",
            "loss.clipped",
            ("ignored", "not Clipped", "remove the block `clipped`", "loss.type: Clipped"),
        ),
        ("{kl: {estimator: K1}}", "kl.estimator", ("would be ignored", "kl.coefficient 0", '(seen: "K1")', "above 0")),
    ],
)
def test_an_unknown_or_partly_ignored_algorithm_is_rejected(algorithm: str, path: str, words: Words) -> None:
    line, _, found, message = only_problem(JOB + f"    algorithm: {algorithm}\n")
    assert (line, found) == (17, f"spec.training.algorithm.{path}")
    assert_words(message, *words)


def test_the_resolved_text_is_a_job_file_without_open_values() -> None:
    job = load_job_text(JOB + "    algorithm: {type: DrGRPO, loss: {clipped: {clipRatioHigh: 0.28}}}\n")
    text = resolved_job_text(job.metadata, job.spec)
    assert (
        """\
    algorithm:
      type: DrGRPO
      advantage:
        type: GroupRelative
        groupRelative:
          normalizeByStd: false
      loss:
        type: Clipped
        clipped:
          clipRatioLow: 0.2
          clipRatioHigh: 0.28
          dualClipRatio: 0.0
      aggregation: SequenceMeanTokenSumNorm
      dropZeroVarianceGroups: false
      dynamicSampling:
        enabled: false
      maskTruncatedResponses: false
      entropyCoefficient: 0.0
      kl:
        coefficient: 0.0
        estimator: K3
        placement: Loss
"""
        in text
    )
    assert "  checkpoint:\n    everySteps: 20\n" in text
    again = load_job_text(text)
    assert resolved_job_text(again.metadata, again.spec) == text
    assert again.spec.model_copy(update={"training": job.spec.training}) == job.spec


@pytest.mark.parametrize(
    ("algorithm", "expected"), [("GRPO", {"actor", "rollout"}), ("PPO", {"actor", "rollout", "critic"})]
)
def test_the_resolved_text_has_the_effective_roles_and_limits(algorithm: str, expected: set[str]) -> None:
    rewards = "[{type: MathAnswer}, {name: length, type: Overlong, overlong: {bufferTokens: 8}}]"
    job = load_job_text(JOB.replace("[{type: MathAnswer}]", rewards) + f"    algorithm: {{type: {algorithm}}}\n")
    text = resolved_job_text(job.metadata, job.spec)
    wire = YAML(typ="safe", pure=True).load(text)["spec"]
    assert set(wire["roles"]) == expected
    limits = {"timeoutSeconds": 10, "numProcesses": 2, "onError": "Fail", "onTimeout": "Exclude", "errorScore": 0}
    answer, length = wire["training"]["rewards"]
    assert answer == {"name": "score", "weight": 1, "type": "MathAnswer", **limits}
    assert length == {
        "name": "length",
        "weight": 1,
        "type": "Overlong",
        "overlong": {"bufferTokens": 8, "penaltyFactor": 1},
    }
    again = load_job_text(text)
    assert again.spec.roles == job.spec.roles
    assert resolved_job_text(again.metadata, again.spec) == text


def test_a_wrong_entry_does_not_make_its_list_too_short() -> None:
    assert [p.path for p in problems(JOB.replace("name: main", "name: MAIN"))] == ["spec.pools[0].name"]


@pytest.mark.parametrize("word", ["yes", "No", "on", "OFF", "y", "N"])
def test_booleans_of_yaml_1_1_are_rejected(word: str) -> None:
    line, column, path, message = scalar_problem(word)
    assert (line, column, path) == (17, 10, "spec.image")
    assert_words(message, "true or false", f"(seen: {word})", "put it in quotes")


@pytest.mark.parametrize(
    ("number", "what"),
    [
        ("010", "a number with a leading zero"),
        ("-07.5", "a number with a leading zero"),
        ("0o17", "an octal number"),
        ("0b11", "a binary number"),
        ("1_000", "a number with underscores"),
        ("1:30", "a number in base 60"),
        ("190:20:30.15", "a number in base 60"),
    ],
)
def test_ambiguous_numbers_are_rejected(number: str, what: str) -> None:
    assert_words(scalar_problem(number)[3], what, f"(seen: {number})", "put it in quotes")


@pytest.mark.parametrize(
    ("old", "new", "path", "advice"),
    [
        ("steps: 10", "steps: 4_0", "spec.training.steps", "whole number"),
        ("steps: 10", "steps: yes", "spec.training.steps", "whole number"),
        ("1e-6", "010", "spec.training.optimizer.learningRate", "plain number"),
        ("type: File", "type: no", "spec.training.dataset.type", f"one of {DATASETS}"),
        ("{name: example}", "{name: example, labels: {a: on}}", "metadata.labels.a", "in quotes"),
        ("steps: 10", "steps: 10\n    rollout: off", "spec.training.rollout", "its fields below it"),
        ("steps: 10", "steps: 10\n    unknown: off", "spec.training.unknown", "true, false, or a plain decimal number"),
        ("spec:\n", "spec:\n  suspend: on\n", "spec.suspend", "true or false"),
    ],
)
def test_advice_on_an_ambiguous_scalar_depends_on_the_type_of_its_field(
    old: str, new: str, path: str, advice: str
) -> None:
    _, _, found, message = only_problem(JOB.replace(old, new))
    assert found == path
    assert_words(message, "YAML parsers", "(seen: ")
    assert message.endswith(advice)


@pytest.mark.parametrize("text", ["'yes'", '"010"', "'1:30'", "example/image:0.1.0", "1.2.3", "nothing"])
def test_quoted_words_and_plain_text_are_strings(text: str) -> None:
    assert load_job_text(JOB + f"  image: {text}\n").spec.image == text.strip("'\"")


def test_a_key_may_not_be_a_boolean_of_yaml_1_1() -> None:
    message = only_problem(JOB.replace("{name: example}", "{name: example, labels: {on: a}}"))[3]
    assert_words(message, "a key must be a string", "true or false", "(seen: on)", "in quotes")


@pytest.mark.parametrize(
    ("text", "line_and_column", "words"),
    [
        ("", (1, 1), ("file is empty", "rljob init")),
        ("# only a comment\n", (1, 1), ("file is empty", "rljob init")),
        (JOB + "---\n" + JOB, (17, 1), ("second document", "one job per file")),
        (JOB + "kind: RLJob\n", (17, 1), ("duplicate key", "remove one")),
        (JOB + "3: x\n", (17, 1), ("key must be a string", "(seen: 3)", "in quotes")),
        (JOB + "? [a]\n: b\n", (17, 3), ("key must be a string", "(seen: a mapping or list)")),
        (JOB + "<<: {a: b}\n", (17, 1), ("merge keys (<<)", "write all fields out")),
        (JOB + "  image: !!str 3\n", (17, 10), ("tags are not supported", "(seen: tag:yaml.org,2002:str)", "remove")),
        (JOB + "  image: *nope\n", (17, 10), ("alias *nope", "no anchor", "define &nope first")),
        (JOB + "  image: .inf\n", (17, 10), ("a finite number", "(seen: .inf)")),
        (
            JOB + "  image: " + "9" * 5000 + "\n",
            (17, 10),
            ("at most 9223372036854775807", f"(seen: {'9' * 40})"),
        ),
        (
            JOB + "  image: 0xFFFFFFFFFFFFFFFFFF\n",
            (17, 10),
            ("at most 9223372036854775807", "(seen: 0xFFFFFFFFFFFFFFFFFF)"),
        ),
        (JOB + "  image: 1e400\n", (17, 10), ("a finite number", "(seen: 1e400)")),
        (JOB + "  image: -1e999\n", (17, 10), ("a finite number", "(seen: -1e999)")),
        (JOB + '  image: "a\\ud800"\n', (17, 10), ("unpaired surrogate", "(seen: \\ud800)")),
        ("a: b\nc: \x07\n", (2, 4), ("U+0007", "not allowed", "remove")),
        ("[" * 100 + "]" * 100, (1, 66), ("at most 64 nested levels",)),
    ],
)
def test_unreadable_text_is_reported(text: str, line_and_column: tuple[int, int], words: Words) -> None:
    line, column, _, message = only_problem(text)
    assert (line, column) == line_and_column
    assert_words(message, *words)


def test_aliases_are_expanded() -> None:
    text = JOB.replace("gpusPerNode: 2", "gpusPerNode: &two 2") + "    batchSize: *two\n"
    assert load_job_text(text).spec.training.batch_size == 2


def test_aliases_that_multiply_are_rejected() -> None:
    # Six levels of ten aliases each would be a million values.
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 6)]
    _, _, _, message = only_problem("\n".join(lines))
    assert_words(message, "at most 20000 values", "aliases")


def test_a_file_that_is_too_long_is_rejected_before_it_is_parsed() -> None:
    assert_words(only_problem("x" * (1024 * 1024 + 1))[3], "at most 1048576 characters", "shorten it")


def test_an_endless_file_is_read_only_up_to_the_limit(tmp_path: Path) -> None:
    endless = tmp_path / "endless.yaml"
    endless.symlink_to("/dev/zero")
    with pytest.raises(JobFileError, match="at most 1048576 characters"):
        load_job_file(endless)


def test_a_broken_rule_is_shown_at_the_value_that_breaks_it() -> None:
    line, column, path, message = only_problem(JOB + "    rollout: {groupSize: 1}\n")
    assert (line, column, path) == (17, 26, "spec.training.rollout.groupSize")
    assert_words(message, "at least 2", "(seen: 1)", "increase groupSize")


def test_a_metric_that_no_evaluation_reports_is_rejected_before_a_run() -> None:
    evaluation = "    evaluations: [{dataset: {type: File, file: {path: b.jsonl}}, numSamples: 4}]\n"
    text = JOB + evaluation + "  checkpoint: {keepBest: {metric: eval/heldout/pass_at_3}}\n"
    assert load_job_text(text).spec.checkpoint.keep_best is not None
    with pytest.raises(JobFileError) as caught:
        load_job_text_to_run(text, "job.yaml")
    [problem] = caught.value.problems
    assert (problem.line, problem.path) == (18, "spec.checkpoint.keepBest.metric")
    assert_words(problem.message, "eval/heldout/pass_at_4", "(seen: eval/heldout/pass_at_3)", "correct the name")
    load_job_text_to_run(text.replace("pass_at_3", "pass_at_4"), "job.yaml")


def test_labels_of_a_judge_that_differ_only_in_case_are_rejected() -> None:
    judge = "{url: 'http://j', model: m, rubric: '{response}', pattern: '(.)', labels: {Good: 1, good: 0}}"
    found = problems(JOB.replace("rewards: [{type: MathAnswer}]", f"rewards: [{{type: Judge, judge: {judge}}}]"))
    [problem] = [each for each in found if each.path.endswith("labels")]
    assert_words(problem.message, "must have different labels", "letter case")


def test_a_missing_block_is_reported_at_the_line_of_its_parent() -> None:
    line, column, path, _ = only_problem(JOB.replace("      file: {path: train.jsonl}\n", ""))
    assert (line, column, path) == (10, 5, "spec.training.dataset.file")


def test_files_are_read_and_the_error_names_them(tmp_path: Path) -> None:
    good, bad, binary = tmp_path / "good.yaml", tmp_path / "bad.yaml", tmp_path / "binary.yaml"
    good.write_text(JOB)
    assert load_job_file(good).metadata.name == "example"
    bad.write_text(JOB.replace("steps: 10", "steps: ten"))
    with pytest.raises(ContractError) as caught:
        load_job_file(bad)
    assert str(caught.value).startswith(f'{bad}:14:12: spec.training.steps: must be a whole number (seen: "ten"); ')
    binary.write_bytes(b"a: \xff")
    with pytest.raises(JobFileError, match=r"must be UTF-8 text \(byte 0xff at position 3 is invalid\)"):
        load_job_file(binary)
    with pytest.raises(JobFileError, match=r"cannot read the file \(No such file or directory\)"):
        load_job_file(tmp_path / "nothing.yaml")
