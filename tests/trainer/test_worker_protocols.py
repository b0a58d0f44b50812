"""The controller's protocol of a role is exactly what its worker class registers."""

from __future__ import annotations

import inspect
from typing import Protocol

import pytest

from rljob_trainer.batch.proto import DataProto
from rljob_trainer.dispatch.modes import Dispatch
from rljob_trainer.dispatch.register import check_protocol, protocol_methods, register, registrations
from rljob_trainer.dispatch.worker import Worker
from rljob_trainer.errors import DispatchError
from rljob_trainer.workers.actor import ActorWorker
from rljob_trainer.workers.critic import CriticWorker
from rljob_trainer.workers.hybrid import HybridWorker
from rljob_trainer.workers.protocols import ActorGroup, CriticGroup, HybridGroup, ReferenceGroup, RewardGroup
from rljob_trainer.workers.reference import ReferenceWorker
from rljob_trainer.workers.reward import RewardWorker

ROLES = [
    (ActorGroup, ActorWorker),
    (CriticGroup, CriticWorker),
    (HybridGroup, HybridWorker),
    (ReferenceGroup, ReferenceWorker),
    (RewardGroup, RewardWorker),
]


@pytest.mark.parametrize(("protocol", "worker"), ROLES)
def test_methods_and_parameters_match(protocol: type, worker: type) -> None:
    assert set(protocol_methods(protocol)) == registrations(worker).keys()
    check_protocol(protocol, worker)


@pytest.mark.parametrize(("protocol", "worker"), ROLES)
def test_types_match_the_dispatch_mode(protocol: type, worker: type) -> None:
    for name, registration in registrations(worker).items():
        seen = dict(inspect.signature(getattr(protocol, name)).parameters)
        of_worker = dict(inspect.signature(getattr(worker, name)).parameters)
        result = str(inspect.signature(getattr(worker, name)).return_annotation)
        is_per_worker = registration.dispatch in (Dispatch.ONE_TO_ALL, Dispatch.ALL_TO_ALL)
        is_split = registration.dispatch == Dispatch.ALL_TO_ALL
        returned = inspect.signature(getattr(protocol, name)).return_annotation
        whole = f"list[{result}]" if is_per_worker else result
        assert returned == (whole if registration.blocking else f"PendingResult[{whole}]"), name
        for parameter in list(seen)[1:]:
            annotation = str(of_worker[parameter].annotation)
            allowed = {f"list[{annotation}]" if is_split else annotation}
            if registration.dispatch == Dispatch.DP_COMPUTE_PROTO and annotation == "DataProto":
                # The caller may have split the batch.
                allowed |= {"list[DataProto]", "DataProto | list[DataProto]"}
            assert seen[parameter].annotation in allowed, (name, parameter)


class Counter(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def count(self, start: int, step: int = 1) -> int:
        return start + step

    @register()
    def marked(self, batch: DataProto) -> DataProto:
        return batch

    def forgotten(self) -> None: ...


class Good(Protocol):
    def count(self, start: int, step: int = 1) -> list[int]: ...


class Wrong(Good, Protocol):
    def forgotten(self) -> list[None]: ...

    def nowhere(self) -> list[None]: ...

    def marked(self, rows: DataProto) -> DataProto: ...


def test_a_protocol_may_have_only_some_methods() -> None:
    check_protocol(Good, Counter)


def test_all_differences_are_named_at_once() -> None:
    with pytest.raises(DispatchError) as raised:
        check_protocol(Wrong, Counter)
    assert str(raised.value).startswith("Wrong does not match Counter")
    for difference in ("forgotten is not marked with @register", "nowhere is missing", r"marked(rows) has", "(batch)"):
        assert difference in str(raised.value)
