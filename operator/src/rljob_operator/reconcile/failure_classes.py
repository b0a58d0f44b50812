"""Whose fault each ending is: the one table that retries follow."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from rljob_api.conditions import Reason
from rljob_api.v1alpha1.status import FailureClass

FAILURE_CLASSES: Mapping[Reason, FailureClass] = MappingProxyType(
    {
        Reason.INVALID_SPEC: FailureClass.CONFIGURATION,
        Reason.STORAGE_MISSING: FailureClass.CONFIGURATION,
        Reason.NAME_CONFLICT: FailureClass.CONFIGURATION,
        Reason.CONFIGURATION_ERROR: FailureClass.CONFIGURATION,
        Reason.SUBMISSION_FAILED: FailureClass.CONFIGURATION,
        Reason.TRAINER_IMAGE_INCOMPATIBLE: FailureClass.CONFIGURATION,
        Reason.RUN_STATE_UNREADABLE: FailureClass.CONFIGURATION,
        Reason.AUTHENTICATION_MISSING: FailureClass.CONFIGURATION,
        Reason.KUBERAY_TOO_OLD: FailureClass.CONFIGURATION,
        Reason.READ_FORBIDDEN: FailureClass.CONFIGURATION,
        Reason.APPLICATION_ERROR: FailureClass.APPLICATION,
        Reason.ENDED_WITHOUT_RESULT: FailureClass.APPLICATION,
        Reason.INFRASTRUCTURE_ERROR: FailureClass.INFRASTRUCTURE,
        Reason.OUT_OF_MEMORY: FailureClass.INFRASTRUCTURE,
        Reason.CLUSTER_LOST: FailureClass.INFRASTRUCTURE,
        Reason.HEAD_LOST: FailureClass.INFRASTRUCTURE,
        Reason.DRIVER_LOST: FailureClass.INFRASTRUCTURE,
        Reason.DASHBOARD_UNREACHABLE: FailureClass.INFRASTRUCTURE,
        Reason.TOKEN_REJECTED: FailureClass.INFRASTRUCTURE,
        Reason.STALLED: FailureClass.INFRASTRUCTURE,
        Reason.SUSPENDED: FailureClass.FREE,
        Reason.RESIZED: FailureClass.FREE,
        Reason.PROVISIONING_DEADLINE_EXCEEDED: FailureClass.FINAL,
        Reason.ACTIVE_DEADLINE_EXCEEDED: FailureClass.FINAL,
        Reason.STOPPED_BY_USER: FailureClass.FINAL,
        Reason.STOPPED_OUTSIDE: FailureClass.FINAL,
    }
)
"""Of every reason with which an attempt can end, but for `Succeeded`."""
