"""The job as it is handed to the trainer: one JSON document in the environment, with the version of its form."""

from __future__ import annotations

from rljob_api.base import Contract
from rljob_api.contract import CONTRACT_VERSION
from rljob_api.scalars import PositiveCount
from rljob_api.v1alpha1.job import RLJobSpec


class TrainerJob(Contract):
    """Everything that the trainer knows about its job."""

    contract_version: PositiveCount = CONTRACT_VERSION
    name: str
    namespace: str | None = None
    uid: str | None = None
    """UID of the resource on a cluster; unset locally."""
    spec: RLJobSpec
