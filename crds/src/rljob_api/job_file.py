"""Job files: YAML text to a checked `RLJob`, or to every problem in it with its line and what to do; and back to text,
with nothing left open.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path as FilePath

from pydantic import ValidationError

from rljob_api.constants import API_GROUP, API_VERSION, KIND
from rljob_api.errors import JobFileError, Problem
from rljob_api.module_names import standard_module_problem
from rljob_api.pydantic_messages import is_echo, plain_message, spread_out
from rljob_api.v1alpha1.advantage import AdvantageType
from rljob_api.v1alpha1.critic import Critic
from rljob_api.v1alpha1.job import RLJob
from rljob_api.v1alpha1.placement_rules import absent_roles
from rljob_api.v1alpha1.pod_warnings import job_warnings
from rljob_api.v1alpha1.recipes import advantage_type, resolve_algorithm
from rljob_api.v1alpha1.reward_rules import LIMITS, WITHOUT_PROCESSES
from rljob_api.v1alpha1.spec import Metadata, RLJobSpec
from rljob_api.yaml_text import Document, Path, YamlProblem, read_yaml, to_yaml, wire_path


def load_job_file(path: FilePath) -> RLJob:
    """The job in a file. Raises JobFileError with every problem found; also if the file cannot be read."""
    return load_job_text(_text_of(path), str(path))


def load_job_file_to_run(path: FilePath) -> RLJob:
    """As `load_job_file`. Refuses also a function whose module is called like one of the standard library: that is none
    of the contract's rules, because which modules there are depends on the Python that reads it."""
    return _job(_text_of(path), str(path), check_modules=True)


def load_job_text(text: str, source: str = "job") -> RLJob:
    """The job in a YAML text; `source` names it in messages. Raises JobFileError with every problem found."""
    return _job(text, source, check_modules=False)


def job_file_warnings(path: FilePath, job: RLJob) -> list[Problem]:
    """Warnings about the job that `load_job_file` has read from this file, in the order of the file."""
    document = read_yaml(path.read_text(encoding="utf-8"))
    found = []
    for doubt in job_warnings(job):
        line, column = _place(doubt.path, document, at_key=False)
        found.append(Problem(wire_path(doubt.path), doubt.message, line, column))
    return sorted(found, key=lambda problem: (problem.line or 0, problem.column or 0))


def resolved_job_text(metadata: Metadata, spec: RLJobSpec) -> str:
    """A job file that says the same with every default written out, those of the recipe too, but of roles that the job
    does not have, and of rewards without processes the limits of processes; the form in which a run folder keeps its
    job."""
    algorithm = resolve_algorithm(spec.training.algorithm).as_algorithm()
    training = spec.training.model_copy(update={"algorithm": algorithm})
    if training.critic is None and advantage_type(algorithm) is AdvantageType.GAE:
        training = training.model_copy(update={"critic": Critic()})
    return to_yaml(
        {
            "apiVersion": f"{API_GROUP}/{API_VERSION}",
            "kind": KIND,
            "metadata": metadata.to_full_wire(),
            "spec": _what_counts(spec.model_copy(update={"training": training})),
        }
    )


def _text_of(path: FilePath) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        problem = Problem("", f"the file cannot be read ({error.strerror}); check the path", 1, 1)
        raise JobFileError(str(path), [problem]) from error
    except UnicodeDecodeError as error:
        problem = Problem("", f"the file is not UTF-8 text (byte {error.start}); save it as UTF-8", 1, 1)
        raise JobFileError(str(path), [problem]) from error


def _job(text: str, source: str, *, check_modules: bool) -> RLJob:
    try:
        document = read_yaml(text)
    except YamlProblem as error:
        raise JobFileError(source, [error.problem]) from None
    problems = list(_module_problems(document)) if check_modules else []
    try:
        job = RLJob.from_wire(document.value)
    except ValidationError as error:
        problems += _problems(error, document)
    if problems:
        raise JobFileError(source, sorted(problems, key=lambda problem: (problem.line or 0, problem.column or 0)))
    return job


def _what_counts(spec: RLJobSpec) -> dict[str, object]:
    wire, absent, rewards = spec.to_full_wire(), absent_roles(spec), spec.training.rewards
    places, training = wire["roles"], wire["training"]
    assert isinstance(places, dict)
    assert isinstance(training, dict)
    wire["roles"] = {role: place for role, place in places.items() if role not in absent}
    training["rewards"] = [
        {name: each for name, each in entry.items() if reward.type not in WITHOUT_PROCESSES or name not in LIMITS}
        for reward, entry in zip(rewards, training["rewards"], strict=True)
    ]
    return wire


def _problems(error: ValidationError, document: Document) -> list[Problem]:
    """pydantic's errors with places."""
    problems = []
    for details in spread_out(error.errors(include_url=False)):
        if is_echo(details):
            continue
        loc = details["loc"]
        if loc and loc[-1] == "[key]":
            loc = loc[:-1]
        line, column = _place(loc, document, at_key=details["type"] in ("extra_forbidden", "missing"))
        problems.append(Problem(wire_path(loc), plain_message(details, RLJob), line, column))
    return problems


def _module_problems(document: Document) -> Iterator[Problem]:
    """The user's functions, of rewards and of algorithms, whose module cannot have the name that it has."""
    for loc, (line, column) in document.values.items():
        if loc[-2:] == ("function", "path"):
            path = document.at(loc)
            if isinstance(path, str) and (problem := standard_module_problem(path)) is not None:
                yield Problem(wire_path(loc), problem, line, column)


def _place(loc: Path, document: Document, *, at_key: bool) -> tuple[int, int]:
    """Where the value stands; where it is missing, the nearest thing around it that is there."""
    for length in range(len(loc), 0, -1):
        at = loc[:length]
        if at in document.values:
            shown_at_key = at_key or length < len(loc)
            return document.keys.get(at, document.values[at]) if shown_at_key else document.values[at]
    return document.values.get((), (1, 1))
