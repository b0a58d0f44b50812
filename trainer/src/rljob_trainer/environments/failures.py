"""Why a call of an environment has no result."""

from __future__ import annotations

from rljob_trainer.errors import TrainerError


class EnvironmentFailure(TrainerError):
    """Base of the failures below."""


class EnvironmentCodeError(EnvironmentFailure):
    """The environment's code raised an exception or returned an unusable value; the message is the traceback's end."""


class EnvironmentTimeoutError(EnvironmentFailure):
    """This call exceeded the time limit, so its process was killed."""


class EnvironmentLostError(EnvironmentFailure):
    """A failure of the infrastructure: the process died, was killed because of another rollout, or the environment
    could not reach a service. A new attempt in another process may work."""

    is_own_call: bool = False
    """True if the process died by itself while it ran this call. The policy may have caused it."""
    was_killed: bool = False
    """True if SIGKILL ended the process from outside, as when memory runs out."""
    caused_by_other: bool = False
    """True if the process ended because of a call of another rollout. This costs the other rollout an attempt or its
    end, so the number of such losses is bounded, and it is no attempt of this rollout."""


class ServiceUnreachableError(EnvironmentLostError):
    """The environment's code could not reach a service, or waited too long for it."""
