"""Mistakes in worker classes and dispatch modes are rejected where they are made, by name. Also: modes that run on few
ranks."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch

from rljob_trainer.batch.proto import DataProto
from rljob_trainer.dispatch.mesh import MeshPosition, check_positions, mesh_position
from rljob_trainer.dispatch.modes import Dispatch, Execute, dispatch_mode, register_dispatch_mode
from rljob_trainer.dispatch.register import register, registration_of, registrations
from rljob_trainer.dispatch.split_gather import SplitCall, gather_list, split_one_to_all
from rljob_trainer.dispatch.worker import Worker
from rljob_trainer.errors import DispatchError


def positions(num_ranks: int) -> list[MeshPosition]:
    return [MeshPosition(rank, num_ranks, is_collected=True) for rank in range(num_ranks)]


@pytest.mark.parametrize(
    ("num_rows", "num_ranks", "expected"), [(4, 2, [0, 1]), (3, 2, [0, 1]), (1, 4, [0]), (6, 4, [0, 1]), (7, 4, [0, 1])]
)
def test_rank_zero_alone_keeps_all_of_its_rows(num_rows: int, num_ranks: int, expected: list[int]) -> None:
    mode = dispatch_mode(Dispatch.DP_COMPUTE_PROTO)
    call = mode.split(positions(num_ranks), (DataProto({"x": torch.arange(num_rows)}),)).only_rank_zero()
    [given] = call.of_rank(0)
    gathered = mode.gather(positions(num_ranks), call, [given])
    assert isinstance(gathered, DataProto)
    assert gathered["x"].tolist() == expected


def test_rank_zero_alone_in_the_last_share_drops_the_padding() -> None:
    last_first = [MeshPosition(1, 2, is_collected=True), MeshPosition(0, 2, is_collected=True)]
    mode = dispatch_mode(Dispatch.DP_COMPUTE_PROTO)
    call = mode.split(last_first, (DataProto({"x": torch.arange(3)}),)).only_rank_zero()
    gathered = mode.gather(last_first, call, [call.of_rank(0)[0]])
    assert isinstance(gathered, DataProto)
    assert gathered["x"].tolist() == [2]


@pytest.mark.parametrize("dispatch", [Dispatch.DP_COMPUTE_PROTO, Dispatch.DP_COMPUTE_METRIC, Dispatch.DP_COMPUTE])
def test_rank_zero_alone_returns_although_a_peer_collects_for_all(dispatch: Dispatch) -> None:
    sizes = {"pp": 2, "dp": 2}
    of_ranks = [mesh_position(rank, sizes, collected_at={"pp": 1}) for rank in range(4)]
    call = SplitCall(((1,), (2,)), {0: 0})
    result: object = {
        Dispatch.DP_COMPUTE_PROTO: DataProto({"x": torch.arange(2)}),
        Dispatch.DP_COMPUTE_METRIC: {"loss": 3},
        Dispatch.DP_COMPUTE: "answer",
    }[dispatch]
    gathered = dispatch_mode(dispatch).gather(of_ranks, call, [result])
    if isinstance(gathered, DataProto):
        assert gathered["x"].tolist() == [0, 1]
    else:
        assert gathered == ({"loss": 3.0} if dispatch == Dispatch.DP_COMPUTE_METRIC else ["answer"])


def test_execute_may_be_a_string() -> None:
    class Some(Worker):
        @register(execute="RANK_ZERO")  # type: ignore[arg-type]
        def method(self) -> None: ...

    assert registration_of(Some, "method").execute is Execute.RANK_ZERO


def keyword_only(self: object, *, named: int) -> None: ...


def any_named(self: object, **named: int) -> None: ...


def generates(self: object) -> Iterator[object]:
    yield self


def _private(self: object) -> None: ...


def ordinary(self: object) -> None: ...


@pytest.mark.parametrize(
    ("method", "options", "problem"),
    [
        (keyword_only, {}, r"keyword_only: parameter 'named: 'int'' is keyword-only"),
        (any_named, {}, r"any_named: parameter '\*\*named: 'int'' is keyword-only"),
        (generates, {}, r"generates: .*generator"),
        (_private, {}, r"_private: private method"),
        (ordinary, {"execute": "RANK_ZER"}, r"ordinary: execute must be 'ALL' or 'RANK_ZERO' \(seen: 'RANK_ZER'\)"),
        (ordinary, {"execute": None}, r"ordinary: execute must be"),
        (
            ordinary,
            {"blocking": "no"},
            r"ordinary: blocking must be .*mesh .*\(seen: 'no', 'dp'\)",
        ),
        (ordinary, {"mesh": 3}, r"ordinary: blocking must be .*mesh .*\(seen: True, 3\)"),
        (ordinary, {"dispatch": 5}, r"ordinary: unknown dispatch mode '5'"),
    ],
)
def test_register_rejects_unusable_methods(method: object, options: dict[str, object], problem: str) -> None:
    with pytest.raises(DispatchError, match=problem):
        register(**options)(method)  # type: ignore[arg-type]


def test_register_without_parentheses_is_rejected() -> None:
    with pytest.raises(DispatchError, match=r"ordinary: write @register\(.*parentheses"):
        register(ordinary)  # type: ignore[arg-type]


def test_wrappers_that_hide_a_method_are_rejected_with_the_class() -> None:
    def wrapped(wrapper: object) -> None:
        registered = register()(lambda self: self)
        type("Hidden", (Worker,), {"method": wrapper(registered)})  # type: ignore[operator]

    for wrapper, kind in [
        (staticmethod, "staticmethod"),
        (property, "property"),
        (functools.lru_cache, "_lru_cache_wrapper"),
    ]:
        with pytest.raises(DispatchError, match=rf"Hidden\.method: a {kind} .* registered method"):
            wrapped(wrapper)


class Base(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def method(self) -> int:
        return 1


def test_an_override_has_to_be_registered_too() -> None:
    with pytest.raises(DispatchError, match=r"Derived\.method: overrides Base\.method, which is registered; mark it"):

        class Derived(Base):
            def method(self) -> int:
                return 2


def test_a_method_can_be_removed() -> None:
    class Without(Base):
        method = None  # type: ignore[assignment]

    assert registrations(Without) == {}


def test_an_invalid_mode_is_rejected() -> None:
    for name in ("", 5):
        with pytest.raises(DispatchError, match="name of a mode must be a non-empty string"):
            register_dispatch_mode(name, split_one_to_all, gather_list)  # type: ignore[arg-type]
    with pytest.raises(DispatchError, match="mode 'NEW' needs two functions"):
        register_dispatch_mode("NEW", split_one_to_all, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (SplitCall(((),), {}), r"ranks none \(there are: 0 to 1\)"),
        (SplitCall(((),), {0: 0, -1: 0}), r"ranks \[-1\]"),
        (SplitCall(((),), {0: 0, 1: 1}), r"share indices \[1\] \(there are 1 "),
    ],
)
def test_an_invalid_split_is_rejected(call: SplitCall, problem: str) -> None:
    with pytest.raises(DispatchError, match=problem):
        call.check(2)


def test_rank_zero_alone_needs_arguments_for_rank_zero() -> None:
    with pytest.raises(DispatchError, match="no arguments for rank 0"):
        SplitCall(((),), {1: 0}).only_rank_zero()


def test_invalid_meshes_are_rejected() -> None:
    with pytest.raises(DispatchError, match="dimension 'tp' must be 1 or more \\(seen: 0\\)"):
        mesh_position(0, {"dp": 2, "tp": 0}, collected_at={})
    with pytest.raises(DispatchError, match="remove 'dp' from `collected_at`"):
        mesh_position(0, {"dp": 2, "tp": 2}, collected_at={"dp": 1})
    with pytest.raises(DispatchError, match=r"actor: ranks .*data ranks \[5\] \(there are: 0 to 0\)"):
        check_positions("actor", [MeshPosition(0, 1, True), MeshPosition(5, 1, False)])
    with pytest.raises(DispatchError, match="actor: there are no ranks"):
        check_positions("actor", [])


@pytest.mark.parametrize("value", [[1.0, 2.0], "high", None, torch.ones(2)])
def test_metrics_are_single_numbers(value: object) -> None:
    mode = dispatch_mode(Dispatch.DP_COMPUTE_METRIC)
    with pytest.raises(DispatchError, match=r"one number for each metric \(metric 'loss' is "):
        mode.gather(positions(1), SplitCall(((),), {0: 0}), [{"loss": value}])
    assert mode.gather(positions(1), SplitCall(((),), {0: 0}), [{"loss": torch.tensor(2)}]) == {"loss": 2.0}
