"""Checks that a job uses only the labels and annotations of batch schedulers that the installation allows: they decide
in which queue or group of pods a pod is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from rljob_api.rule import Path, Violation
from rljob_api.v1alpha1.pools import PodOverlay
from rljob_api.v1alpha1.spec import RLJobSpec

LABELS_RULE = "RLJobSpec.schedulerLabelsOnCluster"
SCHEDULER_DOMAINS = (
    "kai.scheduler",
    "runai",
    "scheduling.k8s.io",
    "scheduling.x-k8s.io",
    "volcano.sh",
    "yunikorn.apache.org",
)
"""Domains, also with subdomains, of the labels and annotations that batch schedulers read from pods: KAI, coscheduling,
Volcano and YuniKorn. Labels and annotations of Kueue are rejected by a rule."""


def scheduler_violations(spec: RLJobSpec, allowed_prefixes: tuple[str, ...] | None) -> Iterator[Violation]:
    """The labels of `scheduling.labels`, and the labels and annotations of batch schedulers in pod templates, that have
    none of the allowed prefixes. `allowed_prefixes`: None if they are unknown; then nothing is reported."""
    if allowed_prefixes is None:
        return
    found: list[Path] = [("spec", "scheduling", "labels", key) for key in spec.scheduling.labels]
    pods: list[tuple[Path, PodOverlay]] = [(("spec", "head"), spec.head.template)]
    pods += [(("spec", "pools", index), pool.template) for index, pool in enumerate(spec.pools)]
    for path, template in pods:
        for field, entries in (("labels", template.labels), ("annotations", template.annotations)):
            found += [(*path, "template", field, key) for key in entries if _is_of_scheduler(key)]
    for path in found:
        if not str(path[-1]).startswith(allowed_prefixes):
            kind = "annotation" if path[-2] == "annotations" else "label"
            yield Violation(
                rule=LABELS_RULE,
                path=path,
                wrong=(
                    f"the operator's installation does not allow this {kind} (allowed prefixes:"
                    f" {', '.join(allowed_prefixes) or 'none'})"
                ),
                advice=(
                    "remove it, or ask the administrator to add its prefix to the operator's value"
                    " jobs.allowedLabelPrefixes"
                ),
                seen=json.dumps(path[-1]),
            )


def _is_of_scheduler(key: str) -> bool:
    domain, slash, _ = key.partition("/")
    return bool(slash) and any(domain == each or domain.endswith(f".{each}") for each in SCHEDULER_DOMAINS)
