"""Base classes of the operator's errors. `kube.errors` and `ray.client` define the errors of their requests."""

from __future__ import annotations


class OperatorError(Exception):
    """Base class of the errors that the operator expects and logs without a traceback."""


class SettingsError(OperatorError):
    """A setting of the operator (an environment variable, a key file or the kubeconfig) is missing or invalid."""
