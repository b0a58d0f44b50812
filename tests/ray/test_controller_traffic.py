"""What passes through the controller in a step is so many bytes per response, however long the responses are."""

from __future__ import annotations

from pathlib import Path

import pytest

from rljob_testing.trainer_program import RunTrainer
from rljob_testing.training_runs import small_job

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

NUM_PROMPTS, GROUP_SIZE = 8, 8
LONG_RESPONSE_TOKENS = 1024
BYTES_PER_TOKEN = 8 + 1 + 4
"""Token id, mask and log-probability: what a rollout has of each token."""


def test_one_number_per_response(cluster: str, tmp_path: Path) -> None:
    job = small_job(num_workers=2, steps=2, batchSize=NUM_PROMPTS, rollout={"groupSize": GROUP_SIZE})
    run = RunTrainer(tmp_path)(job, cluster)
    assert run.exit_code == 0, run.terminal
    sent = run.files.series("perf/controller_sent_bytes")
    received = run.files.series("perf/controller_received_bytes")
    per_response = (sent[-1] + received[-1]) / (NUM_PROMPTS * GROUP_SIZE)
    # Prompts go out once each; the samples that are logged, 8 in every step, come back with their texts.
    assert 8 * 4 < per_response < LONG_RESPONSE_TOKENS * BYTES_PER_TOKEN / 100
    # No step has anything of the one before to carry.
    assert received[0] == received[1]
