"""The controller handles a fixed number of bytes per response and step, whatever the length of the responses."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from rljob_testing.ray_clusters.hybrid_workers import separate_columns
from rljob_testing.training import training_runs
from rljob_trainer.batch.remote import BYTES_PER_ROW

pytestmark = [pytest.mark.ray]

NUM_PROMPTS, GROUP_SIZE = 8, 8
NUM_RESPONSES = NUM_PROMPTS * GROUP_SIZE
LONG_RESPONSE_TOKENS = 1536
BYTES_PER_TOKEN = 8 + 1 + 4
"""Token id, mask and log-probability: the data of a rollout for each token."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that the controller sent and received in each step."""

    sent: list[float]
    received: list[float]

    @property
    def per_response(self) -> float:
        """Bytes per response in the last step."""
        return (self.sent[-1] + self.received[-1]) / NUM_RESPONSES


def traffic(folder: Path, cluster: str, num_steps: int) -> Traffic:
    job = training_runs.small_job(
        num_workers=2, steps=num_steps, batchSize=NUM_PROMPTS, rollout={"groupSize": GROUP_SIZE}
    )
    run = training_runs.RunTrainer(folder)(job, cluster)
    assert run.exit_code == 0, run.terminal
    return Traffic(run.files.series("perf/controller_sent_bytes"), run.files.series("perf/controller_received_bytes"))


@pytest.fixture(scope="module")
def small(cluster: str, tmp_path_factory: pytest.TempPathFactory) -> Traffic:
    return traffic(tmp_path_factory.mktemp("small"), cluster, 2)


def test_the_controller_receives_one_number_per_response(small: Traffic) -> None:
    # Each prompt is sent once; the samples that are logged, 8 in every step, come back with their texts.
    assert 8 * 4 < small.per_response < LONG_RESPONSE_TOKENS * BYTES_PER_TOKEN / 100
    # No step carries data of the previous one.
    assert small.received[0] == small.received[1]


def test_columns_in_objects_of_their_own_cost_a_location_per_response(
    small: Traffic, cluster: str, tmp_path: Path
) -> None:
    """Columns of more than a mebibyte are objects of their own. The rollout's six columns come to the controller as six
    blocks of locations instead of one; scoring and update, which use several columns, are sent six more blocks. What is
    sent to record tokens does not count, because not every step is recorded."""
    with separate_columns():
        large = traffic(tmp_path, cluster, 1)
    more_received, more_sent = (
        (after[-1] - before[-1]) / NUM_RESPONSES / BYTES_PER_ROW
        for before, after in ((small.received, large.received), (small.sent, large.sent))
    )
    assert (more_received, more_sent) == (5, 6)
