"""Numbers that verl 0.9.1 computed on one small batch whose masks have holes, and how ours are compared with them.

`tests/numerics/golden/verl_core_algos.json` has the inputs (6 sequences of 4 tokens in groups of 3, 2 and 1) and verl's
outputs as padded tables, computed in float32 and rounded to 7 digits. `verl_policy_losses.json` has more outputs for
the same inputs. Our functions have no masks: masked tokens, holes included, are removed from the inputs.

Cases are data (`advantage_cases`, `loss_cases`, `correction_cases`): tests check them, and `proof/golden.py` prints the
differences.

Legend: B rows, T columns of a table, N tokens that are not masked.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from rljob_testing.training import token_rows

FOLDER = Path(__file__).parents[3] / "numerics" / "golden"
GOLDEN = json.loads((FOLDER / "verl_core_algos.json").read_text())
LOSSES = json.loads((FOLDER / "verl_policy_losses.json").read_text())
INPUTS = GOLDEN["inputs"]
MASK_BT = torch.tensor(INPUTS["mask"])
ROWS = token_rows.segments_of_mask(MASK_BT)
NUM_TOKENS = int(MASK_BT.sum())
WIDTH = MASK_BT.shape[1]


def tokens_of(table_BT: object) -> Tensor:
    """The unmasked values of a padded table, [N]."""
    return token_rows.flat(torch.tensor(table_BT), MASK_BT)


LOGPROBS_N = tokens_of(INPUTS["log_prob"])
OLD_LOGPROBS_N = tokens_of(INPUTS["old_log_prob"])
VALUES_N = tokens_of(INPUTS["values"])
REWARDS_B = torch.tensor(INPUTS["token_level_rewards"]).sum(dim=1)
GROUPS_B = torch.tensor([ord(uid) - ord("a") for uid in INPUTS["uid"]])


@dataclass(frozen=True)
class Comparison:
    """A value that a function returned and the expected value."""

    what: str
    found: Tensor
    expected: Tensor
    rtol: float
    atol: float


@dataclass(frozen=True)
class GoldenCase:
    """A function and one of verl's cases for it."""

    function: str
    """Name of the function as in a job, such as `loss GSPO`."""
    name: str
    """Name of the case in verl's numbers."""
    compare: Callable[[], Sequence[Comparison]]

    def __str__(self) -> str:
        return f"{self.function}: {self.name}"


def near(what: str, found: Tensor, expected: Tensor) -> Comparison:
    """Compares tensors to the digits that verl's numbers have."""
    return Comparison(what, found, expected, rtol=1e-6, atol=2e-7)


def number(what: str, found: float, expected: float, *, rtol: float = 0.0, atol: float = 0.0) -> Comparison:
    """Compares one number; exactly if no tolerance is given."""
    tensors = [torch.tensor(value, dtype=torch.float64) for value in (found, expected)]
    return Comparison(what, tensors[0], tensors[1], rtol, atol)


def check(case: GoldenCase) -> None:
    """Raises AssertionError if a number of the case is further off than its tolerance."""
    for each in case.compare():
        where = partial("{}: {}".format, each.what)
        torch.testing.assert_close(each.found, each.expected, rtol=each.rtol, atol=each.atol, msg=where)


def largest_difference(case: GoldenCase) -> float:
    """The largest absolute difference over all numbers of a case."""
    return max(float((each.found.double() - each.expected.double()).abs().max()) for each in case.compare())
