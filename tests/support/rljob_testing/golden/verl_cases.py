"""Numbers that verl 0.9.1 computed on one small batch with holes in its masks, and how ours are compared with them.

`tests/numerics/golden/verl_core_algos.json` holds the inputs (6 sequences, 4 tokens, groups of 3, 2 and 1) and verl's
outputs in 32 bits, rounded to 7 digits, as padded tables; `verl_policy_losses.json` more outputs for the same inputs.
What is masked there does not exist here: it is cut out, holes included.

Cases are data (`golden_advantages`, `golden_losses`, `golden_corrections`): tests check them, and `proof/golden.py`
says how near they are.

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
ROWS = token_rows.rows_of_mask(MASK_BT)
NUM_TOKENS = int(MASK_BT.sum())
WIDTH = MASK_BT.shape[1]


def tokens_of(table_BT: object) -> Tensor:
    """[N] of a padded table."""
    return token_rows.flat(torch.tensor(table_BT), MASK_BT)


LOGPROBS_N = tokens_of(INPUTS["log_prob"])
OLD_LOGPROBS_N = tokens_of(INPUTS["old_log_prob"])
VALUES_N = tokens_of(INPUTS["values"])
REWARDS_B = torch.tensor(INPUTS["token_level_rewards"]).sum(dim=1)
GROUPS_B = torch.tensor([ord(uid) - ord("a") for uid in INPUTS["uid"]])


@dataclass(frozen=True)
class Comparison:
    """Of what one call gives."""

    what: str
    found: Tensor
    expected: Tensor
    rtol: float
    atol: float


@dataclass(frozen=True)
class GoldenCase:
    """A function, one of verl's cases of it, and the call."""

    function: str
    """As a job names it."""
    name: str
    """In verl's numbers."""
    compare: Callable[[], Sequence[Comparison]]

    def __str__(self) -> str:
        return f"{self.function}: {self.name}"


def near(what: str, found: Tensor, expected: Tensor) -> Comparison:
    """Tensors, to verl's digits."""
    return Comparison(what, found, expected, rtol=1e-6, atol=2e-7)


def number(what: str, found: float, expected: float, *, rtol: float = 0.0, atol: float = 0.0) -> Comparison:
    """Of one number; exact where no tolerance is given."""
    tensors = [torch.tensor(value, dtype=torch.float64) for value in (found, expected)]
    return Comparison(what, tensors[0], tensors[1], rtol, atol)


def check(case: GoldenCase) -> None:
    """Raises AssertionError."""
    for each in case.compare():
        where = partial("{}: {}".format, each.what)
        torch.testing.assert_close(each.found, each.expected, rtol=each.rtol, atol=each.atol, msg=where)


def largest_difference(case: GoldenCase) -> float:
    """Of all numbers of a case, absolute."""
    return max(float((each.found.double() - each.expected.double()).abs().max()) for each in case.compare())
