"""Which parts of an object that was sent the API server has not kept.

A KubeRay that is too old has a schema without some of them, and the API server then drops these without a word: the
cluster would run, but not guarded.
"""

from __future__ import annotations

from collections.abc import Mapping

from rljob_operator.raw_json import JsonObject, text_at


def asks_for_token(ray_cluster: JsonObject) -> bool:
    """Whether a RayCluster as the API server has it still makes Ray ask for the token of a Secret."""
    options = ("spec", "authOptions")
    return text_at(ray_cluster, *options, "mode") == "token" and text_at(ray_cluster, *options, "secretName") != ""


def missing_fields(sent: JsonObject, stored: JsonObject) -> tuple[str, ...]:
    """Paths such as `spec.authOptions.secretName` below `spec` that were sent and are not in what came back. Values
    that others have changed since are none of them, nor are entries of lists that have another length now."""
    return tuple(_missing("spec", sent.get("spec"), stored.get("spec")))


def _missing(path: str, sent: object, stored: object) -> list[str]:
    found: list[str] = []
    if isinstance(sent, Mapping):
        there: Mapping[object, object] = stored if isinstance(stored, Mapping) else {}
        for name, value in sent.items():
            found += _missing(f"{path}.{name}", value, there[name]) if name in there else [f"{path}.{name}"]
    elif isinstance(sent, list) and isinstance(stored, list) and len(sent) == len(stored):
        for index, (value, kept) in enumerate(zip(sent, stored, strict=True)):
            found += _missing(f"{path}[{index}]", value, kept)
    return found
