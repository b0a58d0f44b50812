"""The controller's view of a role is exactly what its worker class registers."""

from __future__ import annotations

import inspect

import pytest

from rljob_trainer.dispatch.register import registrations
from rljob_trainer.workers.actor import ActorWorker
from rljob_trainer.workers.hybrid import HybridWorker
from rljob_trainer.workers.protocols import ActorGroup, HybridGroup, ReferenceGroup, RewardGroup
from rljob_trainer.workers.reference import ReferenceWorker
from rljob_trainer.workers.reward import RewardWorker


@pytest.mark.parametrize(
    ("protocol", "worker"),
    [
        (ActorGroup, ActorWorker),
        (HybridGroup, HybridWorker),
        (ReferenceGroup, ReferenceWorker),
        (RewardGroup, RewardWorker),
    ],
)
def test_methods_and_number_of_parameters_agree(protocol: type, worker: type) -> None:
    declared = {name for name, value in vars(protocol).items() if inspect.isfunction(value) and name[0] != "_"}
    assert declared == registrations(worker).keys()
    for name in declared:
        group_parameters = inspect.signature(getattr(protocol, name)).parameters
        worker_parameters = inspect.signature(getattr(worker, name)).parameters
        assert len(group_parameters) == len(worker_parameters), name
