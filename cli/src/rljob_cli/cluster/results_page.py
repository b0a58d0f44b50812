"""Writes the page of copied results."""

from __future__ import annotations

from pathlib import Path


def write_page_of(folder: Path) -> Path:
    """Writes the page of the run in this folder, and returns its path."""
    page = folder / "view.html"
    page.write_text("<html></html>", encoding="utf-8")
    return page
