"""`python -m rljob_api.crdgen`: writes the files that are generated from the types; `--check` verifies them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rljob_api.crdgen.manifest import manifest_text
from rljob_api.crdgen.reference import reference_text
from rljob_api.crdgen.troubleshooting import troubleshooting_text

COMMAND = "python -m rljob_api.crdgen"


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 0 if all files are written or up to date, 1 if `--check` finds a difference."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is not up to date")
    parser.add_argument("--root", type=Path, default=_repository(), help="the repository (default: this one)")
    options = parser.parse_args(arguments)
    outputs = _outputs(options.root)
    stale = [path for path, text in outputs.items() if not _is_up_to_date(path, text)]
    if options.check:
        for path in stale:
            print(
                f"{path}: is not up to date with the types in rljob_api; run `{COMMAND}` and commit the result",
                file=sys.stderr,
            )
        return 1 if stale else 0
    for path, text in outputs.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return 0


def _repository() -> Path:
    """Root folder of this file's repository; the file is crds/src/rljob_api/crdgen/__main__.py."""
    return Path(__file__).resolve().parents[4]


def _outputs(root: Path) -> dict[Path, str]:
    """Path and text of each generated file."""
    definition = manifest_text()
    return {
        root / "crds" / "rljobs.yaml": definition,
        # A chart cannot read files outside itself.
        root / "charts" / "rljob-operator" / "files" / "rljobs.yaml": definition,
        root / "docs" / "spec-reference.md": reference_text(),
        root / "docs" / "troubleshooting.md": troubleshooting_text(),
    }


def _is_up_to_date(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == text


if __name__ == "__main__":
    sys.exit(main())
