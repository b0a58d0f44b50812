"""Builds the CustomResourceDefinition from the structural schema, as an object and as YAML text."""

from __future__ import annotations

import io

from ruamel.yaml import YAML

from rljob_api.constants import API_GROUP, API_VERSION, KIND
from rljob_api.crdgen.structural import Schema, root_schema

PLURAL = "rljobs"
_HEADER = "# Generated from the types in rljob_api by `python -m rljob_api.crdgen`; do not edit.\n"

_COLUMNS = (
    ("Phase", "string", ".status.phase", 0),
    ("Reason", "string", ".status.reason", 0),
    ("Step", "integer", ".status.progress.step", 0),
    ("Reward", "number", ".status.progress.rewardMean", 0),
    ("Ckpt", "integer", ".status.checkpoint.step", 0),
    ("Attempt", "integer", ".status.counters.attempts", 0),
    ("GPUs", "integer", ".status.gpus", 0),
    ("Total", "integer", ".status.progress.totalSteps", 1),
    ("Failures", "integer", ".status.counters.failedAttempts", 1),
    ("Cluster", "string", ".status.attempts[-1:].cluster", 1),
    ("Age", "date", ".metadata.creationTimestamp", 0),
)
"""Columns of `kubectl get`: name, type, JSON path and priority; only `-o wide` shows columns of priority 1."""


def custom_resource_definition() -> Schema:
    """The CRD as a Kubernetes object."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{API_GROUP}"},
        "spec": {
            "group": API_GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": ["rlj"],
                "categories": ["all", "ml"],
            },
            "versions": [
                {
                    "name": API_VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    # For the operator's listings of jobs that are not cleaned up. Kubernetes 1.30 ignores this.
                    "selectableFields": [{"jsonPath": ".status.result.cleanedUpAt"}],
                    "additionalPrinterColumns": [
                        {"name": name, "type": kind, "jsonPath": path} | ({"priority": priority} if priority else {})
                        for name, kind, path, priority in _COLUMNS
                    ],
                    "schema": {"openAPIV3Schema": root_schema()},
                }
            ],
        },
    }


def manifest_text() -> str:
    """The CRD as YAML, ready for `kubectl apply`."""
    writer = YAML(typ="safe", pure=True)
    writer.default_flow_style = False
    writer.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    writer.width = 120
    stream = io.StringIO()
    writer.dump(custom_resource_definition(), stream)
    return _HEADER + stream.getvalue()
