"""Fields that an API server has dropped from an object are found, and changes by others are not taken for dropped
fields."""

from __future__ import annotations

import pytest

from rljob_operator.kube.allowed_calls import missing_fields
from rljob_operator.kube.observed_objects import observed_cluster
from rljob_operator.manifests.access import asks_for_token
from rljob_operator.raw_json import JsonObject

SENT: JsonObject = {
    "metadata": {"name": "left out of the comparison"},
    "spec": {
        "authOptions": {"mode": "token", "secretName": "s"},
        "groups": [{"name": "a", "numOfHosts": 2}, {"name": "b"}],
        "empty": {},
    },
}


def stored(**changes: object) -> JsonObject:
    return {"spec": {**SENT["spec"], **changes}}  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("there", "missing"),
    [
        (stored(), ()),
        (stored(added="by a default"), ()),
        (stored(authOptions={"mode": "other", "secretName": "changed by somebody"}), ()),
        (stored(authOptions={"mode": "token"}), ("spec.authOptions.secretName",)),
        (stored(authOptions=None), ("spec.authOptions.mode", "spec.authOptions.secretName")),
        (stored(groups=[{"name": "a"}, {}]), ("spec.groups[0].numOfHosts", "spec.groups[1].name")),
        (stored(groups=[{"name": "a"}]), ()),
        ({"spec": {}}, ("spec.authOptions", "spec.groups", "spec.empty")),
        ({}, ("spec.authOptions", "spec.groups", "spec.empty")),
    ],
)
def test_a_missing_field_is_named_by_its_path(there: JsonObject, missing: tuple[str, ...]) -> None:
    assert missing_fields(SENT, there) == missing


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"mode": "token", "secretName": "s"}, True),
        ({"mode": "token"}, False),
        ({"mode": "token", "secretName": ""}, False),
        ({"mode": "disabled", "secretName": "s"}, False),
        ({}, False),
        (None, False),
    ],
)
def test_a_cluster_requires_a_token_only_with_mode_and_secret(options: object, expected: bool) -> None:
    assert asks_for_token(stored(authOptions=options)) is expected
    raw = {**stored(authOptions=options), "metadata": {"name": "x", "uid": "y"}}
    assert observed_cluster(raw).asks_for_token is expected
    assert not asks_for_token({})
