"""`RLJob`: the Kubernetes object, or job file, that describes a reinforcement-learning post-training run."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from rljob_api.base import WireModel
from rljob_api.v1alpha1.rules import violations
from rljob_api.v1alpha1.spec import Metadata, RLJobSpec
from rljob_api.v1alpha1.status import RLJobStatus

RULE_ERROR = "rljob_rule"
"""Type of pydantic errors for broken rules. Their context has the keys `rule`, `wrong` and `advice`."""


class RLJob(WireModel):
    """A reinforcement-learning post-training job."""

    api_version: Literal["rljob.dev/v1alpha1"]
    kind: Literal["RLJob"]
    metadata: Metadata
    spec: RLJobSpec
    status: RLJobStatus | None = None

    @model_validator(mode="after")
    def _obeys_the_rules(self) -> Self:
        """Reports each fault that breaks a rule as a separate error, with the path of the fault."""
        broken = [
            InitErrorDetails(
                type=PydanticCustomError(
                    RULE_ERROR, "{wrong}; {advice}", {"rule": found.rule, "wrong": found.wrong, "advice": found.advice}
                ),
                loc=found.path,
                input=found.seen,
            )
            for found in (*violations(self.metadata, ("metadata",)), *violations(self.spec, ("spec",)))
        ]
        if broken:
            raise ValidationError.from_exception_data(type(self).__name__, broken)
        return self
