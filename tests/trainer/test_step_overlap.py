"""A step starts all calls that do not depend on each other before it waits for the first of them; otherwise roles on
pools of their own would wait for each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, ParamSpec, TypeVar

import pytest

from rljob_testing.training import stub_step
from rljob_trainer.workers.protocols import PendingResult

Arguments = ParamSpec("Arguments")
Result_co = TypeVar("Result_co", covariant=True)

AFTER_ROLLOUT = {"start_scoring", "compute_scores", "compute_logprobs", "compute_ref_logprobs", "compute_values"}
UPDATES = {"update_critic", "update_policy"}


@dataclass
class Calls:
    """The calls of one step, by name."""

    begun: list[str] = field(default_factory=list)
    awaited: list[str] = field(default_factory=list)

    def of(
        self, method: Callable[Arguments, PendingResult[Result_co]], peers: set[str]
    ) -> Callable[Arguments, Due[Result_co]]:
        """The method, whose result may be requested once all of its peers have started."""

        def begin(*arguments: Arguments.args, **named: Arguments.kwargs) -> Due[Result_co]:
            self.begun.append(method.__name__)
            return Due(self, method.__name__, peers, method(*arguments, **named).result())

        return begin


@dataclass(frozen=True)
class Due(Generic[Result_co]):
    """A result that fails the test if it is requested too early."""

    calls: Calls
    name: str
    peers: set[str]
    value: Result_co

    def result(self) -> Result_co:
        missing = self.peers - set(self.calls.begun)
        assert not missing, f"{self.name} was waited for before {missing} began"
        self.calls.awaited.append(self.name)
        return self.value


def test_independent_calls_are_started_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rljob_trainer.controller.rollout_phase.stored", lambda batch: batch)
    reference, critic, model, calls = stub_step.Reference(), stub_step.Critic(), stub_step.RewardModel(), Calls()
    wire: dict[str, object] = {"type": "PPO", "kl": {"coefficient": 0.1, "placement": "Reward"}}
    weights, scores = {"score": 1.0, "liking": 1.0}, {"score": [0, 1] * 3}
    found = stub_step.step_of(wire, weights, scores, reference, critic, model, has_single_update=False)
    for group, name, peers in (
        (found.rewards, "start_scoring", AFTER_ROLLOUT),
        (model, "compute_scores", AFTER_ROLLOUT),
        (found.actor, "compute_logprobs", AFTER_ROLLOUT),
        (reference, "compute_ref_logprobs", AFTER_ROLLOUT),
        (critic, "compute_values", AFTER_ROLLOUT),
        (critic, "update_critic", UPDATES),
        (found.actor, "update_policy", UPDATES),
    ):
        monkeypatch.setattr(group, name, calls.of(getattr(group, name), peers))
    found.step.run(stub_step.PROMPTS, 0)
    assert set(calls.begun[:5]) == set(calls.awaited[:5]) == AFTER_ROLLOUT
    assert set(calls.begun[5:]) == set(calls.awaited[5:]) == UPDATES
