"""Everything that the operator raises on purpose; `kube.errors` and `ray.client` say more about their own edges."""

from __future__ import annotations


class OperatorError(Exception):
    """The base of all of them."""


class SettingsError(OperatorError):
    """The operator's environment cannot be used as it is."""
