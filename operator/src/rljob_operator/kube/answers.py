"""Whether an answer of the API server is to be believed: what stands between it and this process may answer in its
place, or from a cache, and nothing may be taken for done or for gone by that."""

from __future__ import annotations

from rljob_operator.kube.errors import UnavailableError
from rljob_operator.raw_json import JsonObject, text_at


def require_object(answer: JsonObject, kind: str, name: str) -> JsonObject:
    """The answer, if it is the object that was asked for. Raises UnavailableError."""
    if text_at(answer, "kind") != kind or text_at(answer, "metadata", "name") != name:
        raise UnavailableError(f"{kind} {name}: the answer is no {kind} of this name")
    return answer


def require_list(answer: JsonObject, kind: str) -> JsonObject:
    """The answer, if it is a list of this kind. Raises UnavailableError."""
    if text_at(answer, "kind") != kind:
        raise UnavailableError(f"the answer is no {kind}")
    return answer


def require_news(what: str, version: str, known: int) -> None:
    """Raises UnavailableError for an answer of a version older than one that was known before it was asked for: what
    is missing in it is not gone."""
    if 0 <= version_number(version) < known:
        raise UnavailableError(f"{what}: the answer is of version {version}, older than {known}, which was seen before")


def version_number(version: str) -> int:
    """-1 for a resource version that is no number, which is nothing that Kubernetes promises, and what all its servers
    do."""
    return int(version) if version.isascii() and version.isdecimal() else -1
