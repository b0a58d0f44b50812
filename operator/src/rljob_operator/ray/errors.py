"""What can come of asking a Ray dashboard."""

from __future__ import annotations

from rljob_operator.errors import OperatorError


class RayError(OperatorError):
    """A request to a dashboard that did not do what was asked."""


class DashboardUnreachableError(RayError):
    """No answer, or one that only says that Ray is not well; the same request may work later."""


class TokenRejectedError(RayError):
    """The dashboard accepts none of the tokens."""


class DashboardOpenError(RayError):
    """The dashboard answers without a token. Nothing may be submitted to it."""


class RayRefusedError(RayError):
    """Ray understood and did not do it. Holds its words."""
