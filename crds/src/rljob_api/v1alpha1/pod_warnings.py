"""Warnings: what is valid in a job and probably a mistake. The API server accepts its pods, some with a warning."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from rljob_api.errors import HandoverError
from rljob_api.handover import TrainerJob, dump_job
from rljob_api.quantities import number_of
from rljob_api.v1alpha1.affinity import Affinity, PodTerm
from rljob_api.v1alpha1.job import RLJob
from rljob_api.v1alpha1.pools import Head, Pool
from rljob_api.v1alpha1.rule import Path, Violation, wire_name

_KUEUE = "kueue.x-k8s.io/"
_BYTES = ("memory", "ephemeral-storage")


def job_warnings(job: RLJob) -> tuple[Violation, ...]:
    """All of them, with their places in the job."""
    places: list[tuple[Path, Head | Pool]] = [(("spec", "head"), job.spec.head)]
    places += [(("spec", "pools", index), pool) for index, pool in enumerate(job.spec.pools)]
    return (
        *_kueue("labels", job.metadata.labels),
        *_kueue("annotations", job.metadata.annotations),
        *(found for path, part in places for found in _of_pods(path, part)),
        *_size(job),
    )


def _kueue(field: str, entries: Mapping[str, str]) -> Iterator[Violation]:
    for key, value in entries.items():
        if key.startswith(_KUEUE):
            yield Violation(
                rule="Metadata.queue",
                path=("metadata", field, key),
                wrong="has no effect: this version does not work with Kueue, and the job starts without waiting in a"
                " queue",
                advice="remove it, or create the job when there is room for it",
                seen=json.dumps(value),
            )


def _of_pods(path: Path, part: Head | Pool) -> Iterator[Violation]:
    for field, amounts in (("requests", part.resources.requests), ("limits", part.resources.limits)):
        for name, text in amounts.items():
            if name in _BYTES and number_of(text).denominator != 1:
                yield Violation(
                    rule="Resources.bytes",
                    path=(*path, "resources", field, name),
                    wrong="is not a whole number of bytes",
                    advice="write such as 400M or 400Mi ('m' stands for thousandths)",
                    seen=json.dumps(text),
                )
    if part.template.affinity is not None:
        for at in _terms_without_selector(part.template.affinity):
            yield Violation(
                rule="PodTerm.labelSelector",
                path=(*path, "template", "affinity", *at),
                wrong="has no labelSelector and selects no pod",
                advice="write a labelSelector ({} selects all pods of the namespaces)",
            )


def _terms_without_selector(affinity: Affinity) -> Iterator[Path]:
    for field in ("pod_affinity", "pod_anti_affinity"):
        part = affinity.pod_affinity if field == "pod_affinity" else affinity.pod_anti_affinity
        if part is None:
            continue
        above = wire_name(Affinity, field)
        terms: list[tuple[Path, PodTerm]] = [
            ((above, "requiredDuringSchedulingIgnoredDuringExecution", index), term)
            for index, term in enumerate(part.required_during_scheduling_ignored_during_execution)
        ]
        terms += [
            (
                (above, "preferredDuringSchedulingIgnoredDuringExecution", index, "podAffinityTerm"),
                each.pod_affinity_term,
            )
            for index, each in enumerate(part.preferred_during_scheduling_ignored_during_execution)
        ]
        yield from (at for at, term in terms if term.label_selector is None)


def _size(job: RLJob) -> Iterator[Violation]:
    """A large job runs on one machine, and never gets to the pods of a cluster."""
    try:
        dump_job(TrainerJob(name=job.metadata.name, spec=job.spec))
    except HandoverError as error:
        yield Violation(
            rule="RLJobSpec.size",
            path=("spec",),
            wrong=f"is too large for a cluster ({error})",
            advice="ignore this for `rljob run`",
        )
