"""Base classes of the operator's errors. `kube.errors` and `ray.client` define the errors of their requests."""

from __future__ import annotations


class OperatorError(Exception):
    """Base class of all errors that the operator raises on purpose."""


class SettingsError(OperatorError):
    """A setting of the operator (environment variable or file) is missing or invalid."""
