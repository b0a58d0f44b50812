"""The error of this package."""

from __future__ import annotations


class PageError(Exception):
    """A run's folder cannot be read, or a page cannot be written. The message names the file, the fault, and what to
    do."""
