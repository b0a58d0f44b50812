"""Folders as a run on CPUs leaves them: the job, metrics of a few steps, a timeline. Numbers are those of a real run of
`make demo`'s model on two cores, rounded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

JOB = """\
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata: {name: demo}
spec:
  pools: [{name: main, nodes: 1, gpusPerNode: 1}]
  training:
    model: {source: ./model, dtype: Float32}
    dataset: {type: File, file: {path: rows.jsonl}, maxPromptTokens: 8}
    rewards: [{type: Function, function: {path: "score:score"}}]
    rollout: {groupSize: 16, maxNewTokens: 8, maxNumSequences: 512, engine: VLLM, compile: Never}
    steps: 5
    batchSize: 32
"""
MODEL_CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "tie_word_embeddings": True,
}
MEBIBYTE = 2**20


def step_row(step: int, seconds: float = 0.3, **others: float) -> dict[str, float]:
    """Of metrics.jsonl. Of the seconds 0.6 are generation, 0.3 the update."""
    return {
        "step": step,
        "wall_time": 1_700_000_000.0 + step,
        "prompt_length/mean": 6.0,
        "response_length/mean": 6.0,
        "response_length/max": 8.0,
        "response_length/clip_ratio": 0.01,
        "actor/learned_fraction": 0.9,
        "perf/token_imbalance": 1.0,
        "timing_s/step": seconds,
        "timing_s/rollout": 0.62 * seconds,
        "timing_s/weight_sync": 0.02 * seconds,
        "timing_s/generate": 0.6 * seconds,
        "timing_s/reward": 0.03 * seconds,
        "timing_s/update_actor": 0.3 * seconds,
        "memory/parameters_bytes_max": 0.5 * MEBIBYTE,
        "memory/kv_cache_bytes_max": 1024.0 * MEBIBYTE,
        "memory/during_generate_bytes_max": 1026.0 * MEBIBYTE,
        "memory/process_bytes_max": 1300.0 * MEBIBYTE,
        **others,
    }


def write_run(folder: Path, rows: Sequence[dict[str, float]] | None = None, job: str = JOB) -> Path:
    """The run's folder with everything that it needs."""
    model = folder / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(MODEL_CONFIG))
    (folder / "job.yaml").write_text(job)
    (folder / "resolved.yaml").write_text(job)
    lines = [step_row(1, 2.0), *(step_row(step, 0.28 + 0.01 * step) for step in range(2, 6))] if rows is None else rows
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    return folder


def write_timeline(folder: Path, step: int, busy_share: float) -> None:
    """Of a step of one second, in which the worker does something for that share."""
    events: list[dict[str, object]] = [
        {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": name}}
        for pid, name in enumerate(("controller", "main, rank 0"))
    ]
    spans = ((0, "rollout", 1e6), (1, "hybrid.generate_sequences", busy_share * 1e6))
    events += [{"ph": "X", "pid": pid, "tid": 1, "name": name, "ts": 0.0, "dur": dur} for pid, name, dur in spans]
    file = folder / "timelines" / f"step-{step:06d}.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps({"traceEvents": events}))
