"""Every reason that a condition can have is explained, and the page shows each once."""

from __future__ import annotations

import re
from pathlib import Path

from rljob_api.conditions import FAILURE_CLASSES, REASONS, ConditionType, Reason
from rljob_api.crdgen.troubleshooting import troubleshooting_text
from rljob_api.explanations import EXPLANATIONS
from rljob_api.v1alpha1.status import FailureClass

RELIABILITY = Path(__file__).parents[2] / "docs" / "reliability.md"


def test_every_reason_belongs_to_a_condition_and_is_explained() -> None:
    assert set(REASONS) == set(ConditionType)
    assert {reason for reasons in REASONS.values() for reason in reasons} == set(Reason)
    assert set(EXPLANATIONS) == set(Reason)


def test_explanations_are_sentences_that_fit_a_terminal() -> None:
    for reason, explanation in EXPLANATIONS.items():
        for text in (explanation.means, explanation.advice):
            assert re.match(r"[A-Z`].*\.$", text), f"{reason}: {text}"
            assert len(text) < 300, f"{reason}: {text}"
            assert "  " not in text, f"{reason}: {text}"


def test_the_page_has_one_heading_for_each_reason_and_no_dead_link() -> None:
    page = troubleshooting_text()
    headings = re.findall(r"^### (\w+)$", page, re.MULTILINE)
    assert sorted(headings) == sorted(Reason)
    anchors = {heading.lower().replace(" ", "-") for heading in re.findall(r"^#+ (.*)$", page, re.MULTILINE)}
    assert set(re.findall(r"\(#([^)]*)\)", page)) <= anchors


def test_a_reason_of_two_conditions_names_both() -> None:
    page = troubleshooting_text()
    memory = page[page.index("### OutOfMemory") : page.index("### InfrastructureError")]
    assert "(`OOMKilled`). Also a reason of Retrying, Finished, Failed.\n" in memory
    failed = page[page.index("## Reasons of Failed") :]
    assert "[OutOfMemory](#outofmemory)" in failed
    assert "### OutOfMemory" not in failed


def test_the_page_about_failures_has_the_class_of_each_reason() -> None:
    section = RELIABILITY.read_text().partition("## Failure classes\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("| ")]
    found = {row[0]: set(re.sub(r"\([^)]*\)", "", row[1]).replace(" ", "").split(",")) for row in rows[1:]}
    expected = {
        each.value: {reason.value for reason, found in FAILURE_CLASSES.items() if found is each}
        for each in FailureClass
    }
    assert found == expected
