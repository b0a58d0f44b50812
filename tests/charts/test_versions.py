"""One version in all files that name it, and Dockerfiles that build without a registry."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from rljob_testing.cluster import charts

REPOSITORY = Path(__file__).parents[2]
DOCKERFILES = [REPOSITORY / "images" / name / "Dockerfile" for name in ("operator", "trainer")]


def test_chart_images_and_packages_have_one_version() -> None:
    packages = {
        str(charts.value_at(tomllib.loads((REPOSITORY / folder / "pyproject.toml").read_text()), "project", "version"))
        for folder in ("crds", "cli", "operator", "trainer")
    }
    assert len(packages) == 1
    version = packages.pop()
    chart = YAML(typ="safe").load((charts.CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (version, version)
    assert charts.value_at(values(), "trainer", "image") == f"rljob-trainer:{version}"
    for dockerfile in DOCKERFILES:
        assert re.findall(r"^ARG VERSION=(.*)$", dockerfile.read_text(), flags=re.MULTILINE) == [version]


def test_the_chart_names_the_ray_of_the_trainer_image() -> None:
    for device in ("cpu", "gpu"):
        pins = (REPOSITORY / "constraints" / f"pins-{device}.txt").read_text()
        assert f"ray=={charts.value_at(values(), 'trainer', 'rayVersion')}\n" in pins


def values() -> object:
    return YAML(typ="safe").load((charts.CHART / "values.yaml").read_text())


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.parent.name)
def test_an_image_is_based_only_on_debian_and_does_not_run_as_root(dockerfile: Path) -> None:
    text = dockerfile.read_text()
    stages = set(re.findall(r" AS (\S+)$", text, flags=re.MULTILINE))
    bases = set(re.findall(r"^FROM (\S+)", text, flags=re.MULTILINE))
    assert {base for base in bases - stages if "$" not in base} == {"debian:bookworm-slim"}
    assert "# syntax=" not in text
    last_user = re.findall(r"^USER (\d+):(\d+)$", text, flags=re.MULTILINE)[-1]
    assert last_user in {("65532", "65532"), ("1000", "1000")}


def test_dependencies_in_images_are_checked_against_hashes() -> None:
    for dockerfile in DOCKERFILES:
        commands = dockerfile.read_text().replace("\\\n", " ").splitlines()
        installs = [command for command in commands if "pip install" in command]
        assert installs
        assert [
            command for command in installs if "--require-hashes" not in command and "--offline" not in command
        ] == []
