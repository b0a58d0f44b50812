"""`rljob plan --from-run --json` (`kind: RunReport`) and `--calibrate --json` (`kind: Calibration`, whose `gpu` is the
kind of device that the profile is for): for programs. Whole bytes, and seconds; names as in the job file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rljob_cli.plan.document import FORMAT_VERSION
from rljob_cli.plan.run_text import ComparedRun
from rljob_planner.advice.comparison import ComparedTime
from rljob_planner.advice.run_report import RunReport
from rljob_planner.advice.tuning import Advice
from rljob_planner.timing_types import Seconds


def run_document(report: RunReport) -> dict[str, object]:
    """Of `--from-run`."""
    lengths = report.facts.lengths
    return {
        "formatVersion": FORMAT_VERSION,
        "kind": "RunReport",
        "run": report.name,
        "state": report.state,
        "constants": report.constants,
        "steps": report.facts.num_steps,
        "lengths": {
            "promptMean": lengths.prompt_mean,
            "responseMean": lengths.response_mean,
            "responseMax": lengths.response_max,
            "clipRatio": lengths.clip_ratio,
        },
        "learnedFraction": report.facts.learned_fraction,
        "tokenImbalance": report.facts.token_imbalance,
        "idleShareByStep": {str(step): facts.idle_share for step, facts in report.timelines.items()},
        "seconds": _times(report.times),
        "memory": [
            {"name": each.name, "predictedBytes": _bytes(each.predicted), "measuredBytes": _bytes(each.measured)}
            for each in report.memory
        ],
        "findings": [{"text": each.text, "section": each.section} for each in report.findings],
        "changes": [_advice(each) for each in report.advice],
        "changesTogether": [_advice(each) for each in report.together],
    }


def calibration_document(file: Path, gpu: str, runs: Sequence[ComparedRun]) -> dict[str, object]:
    """Of `--calibrate`."""
    return {
        "formatVersion": FORMAT_VERSION,
        "kind": "Calibration",
        "profile": str(file),
        "gpu": gpu,
        "runs": [{"run": name, "seconds": _times(after), "before": _times(before)} for name, after, before in runs],
    }


def _times(times: Sequence[ComparedTime]) -> list[dict[str, object]]:
    return [
        {
            "name": each.name,
            "predicted": None if each.predicted is None else _seconds(each.predicted),
            "measured": None
            if each.measured is None
            else {"median": each.measured.median, "low": each.measured.low, "high": each.measured.high},
            "boundBy": each.bound_by,
        }
        for each in times
    ]


def _advice(advice: Advice) -> dict[str, object]:
    return {
        "field": advice.change.field,
        "value": advice.change.value,
        "before": advice.change.before,
        "price": advice.price.name,
        "stepSeconds": _seconds(advice.step),
        "gainSeconds": advice.gain,
        "gainShare": advice.share,
        "gainByPhase": dict(advice.phases),
        "verdict": advice.verdict.name,
        "worst": {
            "phase": advice.worst.phase.name,
            "pool": advice.worst.pool,
            "bytes": round(advice.worst.total),
            "limit": round(advice.worst.limit),
        },
        "moreGpus": advice.more_gpus,
        "section": advice.section,
    }


def _bytes(number: float | None) -> int | None:
    return None if number is None else round(number)


def _seconds(seconds: Seconds) -> dict[str, float]:
    return {"low": seconds.low, "likely": seconds.likely, "high": seconds.high}
