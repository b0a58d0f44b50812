"""Job files: reads YAML into a validated `RLJob`, or reports the problems with their lines; and writes a job with all
defaults as YAML.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path as FilePath

from pydantic import ValidationError

from rljob_api.constants import API_GROUP, API_VERSION, KIND
from rljob_api.errors import JobFileError, Problem
from rljob_api.job_changes import Change, apply_changes
from rljob_api.job_checks import URL_PASSWORD_RULE, cluster_violations, job_warnings
from rljob_api.names import standard_library_clash
from rljob_api.pydantic_messages import advice_for_scalar, follows_from_another, plain_message
from rljob_api.rule import Violation
from rljob_api.scalars import has_user
from rljob_api.training_checks import training_violations
from rljob_api.v1alpha1.advantage import AdvantageType
from rljob_api.v1alpha1.job import RULE_ERROR, RLJob
from rljob_api.v1alpha1.model import Critic
from rljob_api.v1alpha1.optional_roles import absent_roles
from rljob_api.v1alpha1.pod_environment import is_secret_name
from rljob_api.v1alpha1.recipes import advantage_type, resolve_algorithm
from rljob_api.v1alpha1.reward import IGNORED_FIELDS
from rljob_api.v1alpha1.spec import Metadata, RLJobSpec
from rljob_api.yaml_faults import AmbiguousScalarProblem, Path, YamlProblem
from rljob_api.yaml_text import MAX_TEXT_CHARACTERS, TOO_LONG, Document, read_yaml, to_yaml, wire_path

_MAX_BYTES = 4 * MAX_TEXT_CHARACTERS
"""Largest number of bytes that is read into memory. A longer file has more than MAX_TEXT_CHARACTERS characters, because
a character has at most 4 bytes in UTF-8."""
_FIELDS = "the fields"
"""What is not checked in a text that is not YAML."""
_ENVIRONMENT_CLASSES = ("spec", "training", "environment", "classes")
_AGENT = ("spec", "training", "environment", "session", "path")


def load_job_file(path: FilePath) -> RLJob:
    """Reads a job file. Raises JobFileError with all problems found, or if the file cannot be read."""
    return load_job_text(read_job_text(path), str(path))


def load_job_file_to_run(path: FilePath, changes: Sequence[Change] = ()) -> RLJob:
    """Reads a job file as `load_job_file` does, with the changes and checks of `load_job_text_to_run`."""
    return load_job_text_to_run(read_job_text(path), str(path), changes)


def read_job_text(path: FilePath) -> str:
    """Reads the text of a job file. Raises JobFileError if the file cannot be read, is too long, or is not UTF-8.

    A command that needs the text again (for warnings, or to print lines) must keep the text, because a pipe can be read
    only once."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise JobFileError(str(path), [TOO_LONG], unchecked=_FIELDS)
        return io.StringIO(data.decode(), newline=None).read()
    except OSError as error:
        problem = Problem("", f"cannot read the file ({error.strerror}); check its path and permissions", 1, 1)
        raise JobFileError(str(path), [problem]) from error
    except UnicodeDecodeError as error:
        wrong = f"the file must be UTF-8 text (byte 0x{data[error.start]:02x} at position {error.start} is invalid)"
        problem = Problem("", f"{wrong}; save it as UTF-8", 1, 1)
        raise JobFileError(str(path), [problem], unchecked=_FIELDS) from error
    except ValueError as error:
        # The path contains a zero byte.
        raise JobFileError(str(path), [Problem("", f"cannot read the file ({error}); check its path", 1, 1)]) from error


def load_job_text(text: str, source: str = "job") -> RLJob:
    """Reads a job from YAML text; `source` is its name in messages. Raises JobFileError with all problems found."""
    return _job(text, source, (), check_more=False)


def load_job_text_to_run(text: str, source: str, changes: Sequence[Change] = ()) -> RLJob:
    """Reads a job as `load_job_text` does, and applies changes of its values. Also rejects two mistakes for which the
    contract has no rule: user functions and classes whose module has the name of a module of the standard library
    (this depends on the version of Python), and a metric of `keepBest` that no evaluation reports."""
    return _job(text, source, changes, check_more=True)


def job_text_warnings(text: str, job: RLJob, changes: Sequence[Change] = ()) -> list[Problem]:
    """Warnings about the job that was loaded from this text with these changes, in the order of their lines."""
    return _located(text, changes, job_warnings(job))


def cluster_problems(text: str, job: RLJob, changes: Sequence[Change] = ()) -> list[Problem]:
    """Why the job that was loaded from this text with these changes cannot run on a Kubernetes cluster, in the order of
    their lines. The operator may have a default image, so a missing image is not among them."""
    violations = cluster_violations(job.spec, job.metadata.labels, has_default_image=True)
    return _located(text, changes, violations)


def _located(text: str, changes: Sequence[Change], violations: Iterable[Violation]) -> list[Problem]:
    document = read_yaml(text)
    apply_changes(document, changes)
    found = []
    for violation in violations:
        hides_line = violation.rule == URL_PASSWORD_RULE
        found.append(_problem(violation.path, violation.message, document, at_key=False, hides_line=hides_line))
    return sorted(found, key=lambda problem: (problem.line or 0, problem.column or 0))


HIDDEN_VALUE = "(not shown)"
"""What `shareable_job_text` has instead of the value of an environment variable."""


def shareable_job_text(metadata: Metadata, spec: RLJobSpec) -> str:
    """Like `resolved_job_text`, without the values of environment variables, because other people may read it: in the
    page of a run, and in a tracker."""
    env = tuple(
        variable if variable.value is None else variable.model_copy(update={"value": HIDDEN_VALUE})
        for variable in spec.env
    )
    return resolved_job_text(metadata, spec.model_copy(update={"env": env}))


def resolved_job_text(metadata: Metadata, spec: RLJobSpec) -> str:
    """An equivalent job file with all defaults, also those of the recipe. A run folder contains its job in this form.

    The file has no settings of roles that the job does not have, and no fields that the type of a reward ignores."""
    algorithm = resolve_algorithm(spec.training.algorithm)
    rewards = tuple(each.model_copy(update={"on_error": each.error_policy}) for each in spec.training.rewards)
    training = spec.training.model_copy(update={"algorithm": algorithm, "rewards": rewards})
    if training.critic is None and advantage_type(algorithm) is AdvantageType.GAE:
        training = training.model_copy(update={"critic": Critic()})
    return to_yaml(
        {
            "apiVersion": f"{API_GROUP}/{API_VERSION}",
            "kind": KIND,
            "metadata": metadata.to_full_wire(),
            "spec": _effective_wire(spec.model_copy(update={"training": training})),
        }
    )


def _job(text: str, source: str, changes: Sequence[Change], *, check_more: bool) -> RLJob:
    try:
        document = read_yaml(text)
        apply_changes(document, changes)
    except YamlProblem as error:
        raise JobFileError(source, [_yaml_problem(error, text)], unchecked=_FIELDS) from None
    problems = list(_module_problems(document)) if check_more else []
    unchecked = ""
    try:
        job = RLJob.from_wire(document.value)
    except ValidationError as error:
        problems += _problems(error, document)
        # pydantic checks the rules only if the types of all fields are right.
        if any(details["type"] != RULE_ERROR for details in error.errors(include_url=False)):
            unchecked = "further rules"
    else:
        violations = training_violations(job.spec) if check_more else ()
        problems += [_problem(each.path, each.message, document, at_key=False) for each in violations]
    if problems:
        secret_lines = {document.value_positions[path][0] for path in _secret_paths(document)}
        secret_lines |= {number for number, line in enumerate(text.splitlines(), start=1) if has_user(line)}
        problems = [replace(problem, hides_line=problem.line in secret_lines) for problem in problems]
        problems.sort(key=lambda problem: (problem.line or 0, problem.column or 0))
        raise JobFileError(source, problems, unchecked=unchecked)
    return job


def _yaml_problem(error: YamlProblem, text: str) -> Problem:
    """The problem of a text that is not YAML, or that YAML parsers interpret differently."""
    problem = error.problem
    if isinstance(error, AmbiguousScalarProblem):
        problem = replace(problem, message=f"{problem.message}; {advice_for_scalar(error.path, RLJob)}")
    # In text that is not YAML, nobody knows to which variable a value belongs, so every value may be a secret. It may
    # begin in the line after `value:`.
    lines = text.splitlines()[max(0, (problem.line or 1) - 2) : problem.line]
    return replace(problem, hides_line=any("value:" in line for line in lines))


def _effective_wire(spec: RLJobSpec) -> dict[str, object]:
    """The full wire form of the spec without settings that have no effect."""
    wire, absent, rewards = spec.to_full_wire(), absent_roles(spec), spec.training.rewards
    roles, training = wire["roles"], wire["training"]
    assert isinstance(roles, dict)
    assert isinstance(training, dict)
    wire["roles"] = {name: role for name, role in roles.items() if name not in absent}
    training["rewards"] = [
        {name: each for name, each in entry.items() if name not in IGNORED_FIELDS.get(reward.type, ())}
        for reward, entry in zip(rewards, training["rewards"], strict=True)
    ]
    return wire


def _problems(error: ValidationError, document: Document) -> list[Problem]:
    """pydantic's errors as problems with line and column."""
    problems, secrets = [], _secret_paths(document)
    for details in error.errors(include_url=False):
        if follows_from_another(details):
            continue
        loc = details["loc"]
        if loc and loc[-1] == "[key]":
            loc = loc[:-1]
        at_key = details["type"] in ("extra_forbidden", "missing")
        if loc in secrets and isinstance(details["input"], str | int | float):
            details = {**details, "input": "***"}
        message = plain_message(details, RLJob)
        if not loc and details["type"] in ("model_type", "model_attributes_type"):
            message = f"{message.rpartition('; ')[0]}; {_EMPTY_JOB_ADVICE}"
        problems.append(_problem(loc, message, document, at_key=at_key))
    return problems


_EMPTY_JOB_ADVICE = "write the fields apiVersion, kind, metadata and spec; `rljob init` writes an example"


def _secret_paths(document: Document) -> set[Path]:
    """Paths of the values in `env` whose variable has the name of a secret, also those under an unknown field name such
    as `vlaue`."""
    found = set()
    for loc in document.value_positions:
        if loc[:2] == ("spec", "env") and len(loc) > 3 and loc[3] not in ("name", "valueFrom"):
            name = (*loc[:3], "name")
            if name in document.value_positions and is_secret_name(str(document.at(name))):
                found.add(loc)
    return found


def _module_problems(document: Document) -> Iterator[Problem]:
    """Problems of user functions (rewards, advantages, losses) and environment classes whose module has the name of a
    module of the standard library."""
    for loc in document.value_positions:
        is_of_class = loc[:4] == _ENVIRONMENT_CLASSES and loc[5:] == ("path",)
        if loc[-2:] == ("function", "path") or is_of_class or loc == _AGENT:
            path = document.at(loc)
            if isinstance(path, str) and (problem := standard_library_clash(path)) is not None:
                yield _problem(loc, problem, document, at_key=False)


def _problem(loc: Path, message: str, document: Document, *, at_key: bool, hides_line: bool = False) -> Problem:
    """A problem of the value at a path, with its line and column, or with the option that has set the value."""
    line, column = _position(loc, document, at_key=at_key)
    if line:
        return Problem(wire_path(loc), message, line, column, hides_line)
    options = (document.options.get(loc[:length]) for length in range(len(loc), 0, -1))
    return Problem(wire_path(loc), message, hides_line=hides_line, option=next(filter(None, options), ""))


def _position(loc: Path, document: Document, *, at_key: bool) -> tuple[int, int]:
    """Line and column of the value at a path, or of its key with `at_key`. If the path does not exist, those of the key
    of the innermost existing value around it. Both are 0 for a value that an option has set."""
    for length in range(len(loc), 0, -1):
        at = loc[:length]
        if at in document.value_positions:
            of_value = document.value_positions[at]
            return document.key_positions.get(at, of_value) if at_key or length < len(loc) else of_value
    return document.value_positions.get((), (1, 1))
