"""Writes the folder of a run, as a trainer would have written it, and reads the document of its page."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from rljob_testing.cli.rljob_command import SMALL_JOB

Json = dict[str, object]
WRITTEN_AT = datetime(2026, 11, 27, 12, 0, tzinfo=UTC)
"""When the trainer has written its last run state, unless a test says otherwise."""
GROUP_SIZE = 4


@dataclass
class RunRecord:
    """What is in the folder. The defaults are a run of 30 steps that is complete."""

    name: str = "small"
    num_steps: int = 30
    total_steps: int = 30
    phase: str = "Complete"
    exit_code: int | None = 0
    """None for an attempt that has not ended."""
    alarms: list[Json] | None = field(default_factory=list)
    error: Json | None = None
    samples: list[Json] = field(default_factory=list)
    tokens: Mapping[str, Json] = field(default_factory=dict)
    timelines: Mapping[str, Json] = field(default_factory=dict)
    job: str = SMALL_JOB
    contract_version: int = 1
    written_at: datetime = WRITTEN_AT
    """When the run began to have this state."""

    def write(self, folder: Path) -> Path:
        """Writes the folder, and returns it."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "job.yaml").write_text(self.job)
        begin = {"attempt": 1, "started": _text(self.written_at - timedelta(minutes=5))}
        end = {"attempt": 1, "ended": _text(self.written_at), "exitCode": self.exit_code}
        write_lines(folder / "attempts.jsonl", [begin, *([] if self.exit_code is None else [end])])
        write_lines(folder / "metrics.jsonl", metrics_lines(self.num_steps))
        write_lines(folder / "samples.jsonl", self.samples)
        (folder / "rljob-run-state.json").write_text(json.dumps(self.state()))
        for sub_folder, documents in (("tokens", self.tokens), ("timelines", self.timelines)):
            (folder / sub_folder).mkdir(exist_ok=True)
            for name, document in documents.items():
                (folder / sub_folder / f"{name}.json").write_text(json.dumps(document))
        return folder

    def state(self) -> Json:
        """The content of the run state."""
        progress = {"step": self.num_steps, "totalSteps": self.total_steps, "updatedAt": _text(self.written_at)}
        fields = {"contractVersion": self.contract_version, "jobName": self.name, "attempt": 1, "phase": self.phase}
        optional = {"alarms": self.alarms, "error": self.error}
        return {
            **fields,
            "progress": progress,
            **{name: value for name, value in optional.items() if value is not None},
            "writtenAt": _text(self.written_at),
        }


def metrics_lines(num_steps: int) -> Iterable[Json]:
    """The metrics of a run whose reward rises: an evaluation before the first step and after every tenth, then one line
    for each step."""
    begin = WRITTEN_AT.timestamp() - num_steps
    for step in range(num_steps + 1):
        progress = step / max(1, num_steps)
        if step % 10 == 0:
            scores = {"eval/heldout/greedy": 0.2 + 0.7 * progress, "eval/heldout/mean_at_1": 0.1 + 0.7 * progress}
            yield {"step": step, "wall_time": begin + step, **scores}
        if step:
            yield {
                "step": step,
                "wall_time": begin + step,
                "critic/rewards/mean": 0.1 + 0.8 * progress + 0.05 * math.sin(step),
                "actor/entropy": 1 - 0.5 * progress,
                "actor/kl_loss": 0.01 * progress,
                "actor/grad_norm": 1 + math.cos(step),
                "response_length/mean": 20 + 5 * math.sin(step / 5),
                "response_length/max": 40.0,
                "response_length/clip_ratio": 0.02,
                "outcome/excluded_fraction": 0.0,
                "actor/trained_fraction": 0.9,
                "perf/throughput": 1000.0,
                "memory/process_bytes_max": 2.0**30,
                "timing_s/generate": 0.6,
                "timing_s/weight_sync": 0.1,
                "timing_s/reward": 0.1,
                "timing_s/update_actor": 0.15,
                "timing_s/step": 1.0,
            }


def sample(step: int, prompt: str, response: str, score: float | None, **fields: object) -> Json:
    """One sample of a training step."""
    return {
        "step": step,
        "kind": "train",
        "group": f"{step}-{prompt}",
        "prompt": prompt,
        "response": response,
        "answer": "4",
        "score": score,
        "rewards": {"accuracy": score},
        "found": {},
        "outcome": "COMPLETED",
        "statuses": {"accuracy": "OK" if score is not None else "ERROR"},
        **fields,
    }


def samples_of(num_samples: int, num_steps: int, response: str = "the answer is {}") -> list[Json]:
    """Samples in groups of `GROUP_SIZE`, evenly distributed over the steps."""
    return [
        sample(
            1 + index // GROUP_SIZE * GROUP_SIZE * num_steps // num_samples,
            f"what is {index // GROUP_SIZE} + 1?",
            response.format(index),
            (index % GROUP_SIZE) / (GROUP_SIZE - 1),
        )
        for index in range(num_samples)
    ]


def conversation(prompt: list[str], response: list[str], group: str = "g") -> Json:
    """A conversation whose response is trained on, except for its last token."""
    total = len(prompt) + len(response)

    def column(value: object) -> list[object]:
        return [None] * len(prompt) + [value] * len(response)

    return {
        "kind": "train",
        "group": group,
        "prompt": "".join(prompt),
        "score": 1.0,
        "outcome": "COMPLETED",
        "omittedTokens": 0,
        "tokens": {
            "text": prompt + response,
            "isSampled": [index >= len(prompt) for index in range(total)],
            "isTrained": [len(prompt) <= index < total - 1 for index in range(total)],
            "rolloutLogprob": column(-0.5),
            "trainerLogprob": [None] * len(prompt) + [-0.5 + 0.4 * (index % 3 - 1) for index in range(len(response))],
            "age": column(0)
            if len(response) < 3
            else [None] * len(prompt) + [index % 4 for index in range(len(response))],
            "advantage": [None] * len(prompt) + [0.8 - 0.4 * (index % 5) for index in range(len(response))],
        },
    }


def timeline() -> Json:
    """One step of 100 ms with a controller and a worker. The worker is idle for 30 ms, because it waits for scores."""
    events: list[Json] = [
        {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": name}}
        for pid, name in enumerate(("controller", "main, rank 0"))
    ]
    for pid, tid, name, begin, end in (
        (0, 1, "rollout", 0, 50),
        (0, 1, "reward", 50, 80),
        (0, 1, "update_actor", 80, 100),
        (1, 1, "hybrid.take", 0, 50),
        (1, 2, "generate", 5, 45),
        (1, 1, "actor.update_policy", 80, 100),
        (1, 1, "forward_backward", 82, 95),
        (1, 0, "idle: scores", 50, 80),
    ):
        events.append(
            {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": begin * 1000, "dur": (end - begin) * 1000}
        )
    for after, at, owners in (
        ("generate", 50, {"parameters": 10, "kv_cache": 100}),
        ("update", 100, {"parameters": 10, "gradients": 10}),
    ):
        common = {"ph": "C", "pid": 1, "tid": 0, "cat": after, "ts": at * 1000}
        events.append({**common, "name": "memory (MiB)", "args": owners})
        events.append({**common, "name": "peak of memory (MiB)", "args": {"since the last boundary": 120}})
        events.append({**common, "name": "process memory (MiB)", "args": {"resident": 500}})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_lines(path: Path, rows: Iterable[Json]) -> None:
    """Writes JSON lines as the trainer does: half of a surrogate pair becomes its escape."""
    with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def document_of(page: Path) -> Json:
    """The JSON document in a page."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    assert found is not None
    data = json.loads(found[1])
    assert isinstance(data, dict)
    return data


def _text(time: datetime) -> str:
    return f"{time:%Y-%m-%dT%H:%M:%SZ}"
