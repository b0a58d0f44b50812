"""What a job needs only on a cluster."""

from __future__ import annotations

import pytest

from rljob_api.job_checks import cluster_violations, is_ray_new_enough
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
