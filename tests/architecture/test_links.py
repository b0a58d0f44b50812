"""Links between pages have a target, every page is in the README's index, and tests that pages name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rljob_testing import pages

PAGES = pages.all_pages()
LINK = re.compile(r"\]\(([^)\s]+)\)")


def links(page: Path) -> list[tuple[Path, str]]:
    """The file and the heading of each link of a page to this repository."""
    found = [link for link in LINK.findall(page.read_text()) if not link.startswith(("http://", "https://"))]
    parts = [link.partition("#") for link in found]
    return [((page.parent / file).resolve() if file else page, anchor) for file, _, anchor in parts]


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(pages.REPOSITORY)))
def test_links_have_a_target(page: Path) -> None:
    for target, anchor in links(page):
        assert target.exists(), target
        assert not anchor or anchor in anchors(target), f"{target}#{anchor}"


def test_the_readme_links_every_page_of_docs() -> None:
    linked = {target for target, _ in links(pages.REPOSITORY / "README.md")}
    assert [page.name for page in sorted((pages.REPOSITORY / "docs").glob("*.md")) if page not in linked] == []


def test_the_tests_that_pages_name_exist() -> None:
    sources = [path for folder in ("tests", "e2e") for path in (pages.REPOSITORY / folder).rglob("test_*.py")]
    existing = {path.stem for path in sources}
    for path in sources:
        existing |= set(re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE))
    named = {name for page in PAGES for name in re.findall(r"`(?:[\w-]+/)*(test_\w+)`", page.read_text())}
    assert len(named) > 50
    assert sorted(named - existing) == []
