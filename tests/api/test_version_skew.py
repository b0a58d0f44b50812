"""What a program of one version reads of what another version wrote."""

from __future__ import annotations

import copy

import pytest
from pydantic import ValidationError

from rljob_api.v1alpha1.job import RLJob
from rljob_testing.valid_job import edited, valid_job


def test_unknown_fields_are_dropped_at_any_depth_and_named() -> None:
    wire = edited(
        valid_job(),
        {
            "foo": 1,
            "spec.training.bar": {"baz": None},
            "spec.training.model.tied": [1],
            "spec.training.dataset.x": None,
        },
    )
    wire["spec"]["pools"][0]["spot"] = True  # type: ignore[index]
    before = copy.deepcopy(wire)
    job, unknown = RLJob.from_newer_wire(wire)
    assert job == RLJob.from_wire(valid_job())
    assert set(unknown) == {
        "foo",
        "spec.pools[0].spot",
        "spec.training.bar",
        "spec.training.dataset.x",
        "spec.training.model.tied",
    }
    assert wire == before


def test_what_is_known_is_read_as_strictly_as_ever() -> None:
    assert RLJob.from_newer_wire(valid_job()) == (RLJob.from_wire(valid_job()), ())
    with pytest.raises(ValidationError) as caught:
        RLJob.from_newer_wire(edited(valid_job(), {"foo": 1, "spec.training.seed": "zero"}))
    assert [error["loc"] for error in caught.value.errors()] == [("spec", "training", "seed")]


def test_only_empty_unknown_fields_are_dropped_where_others_would_matter() -> None:
    empty = {"spec.a": None, "spec.training.b": {}, "spec.training.c": [], "spec.training.model.d": ""}
    job, unknown = RLJob.from_newer_wire(edited(valid_job(), empty), only_empty=True)
    assert job == RLJob.from_wire(valid_job())
    assert set(unknown) == set(empty)
    for value in (0, False, {"x": None}, "text"):
        with pytest.raises(ValidationError) as caught:
            RLJob.from_newer_wire(edited(valid_job(), empty | {"spec.e": value}), only_empty=True)
        assert [error["loc"] for error in caught.value.errors()] == [("spec", "e")]
