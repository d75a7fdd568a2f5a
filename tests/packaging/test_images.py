"""The Dockerfiles name files, extras and versions that exist. Docker itself does not run here: they say so."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from skyrl import __version__

ROOT = Path(__file__).parents[2]
IMAGES = sorted((ROOT / "docker").glob("*.Dockerfile"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def instructions(image: Path, name: str) -> list[str]:
    """The arguments of every such instruction, continued lines joined."""
    text = re.sub(r"\\\n\s*", " ", image.read_text())
    return re.findall(rf"^{name} (.*)$", text, re.MULTILINE)


def ignored() -> tuple[str, ...]:
    """Files that .dockerignore lets through."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    return tuple(line[1:] for line in lines if line.startswith("!"))


def test_there_is_an_image_for_cpus_and_one_for_cuda_and_both_are_marked_as_untried() -> None:
    assert [image.name for image in IMAGES] == ["cpu.Dockerfile", "cuda.Dockerfile"]
    assert all("Not tried yet" in image.read_text().splitlines()[0] for image in IMAGES)


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.name)
def test_what_is_copied_is_there_and_is_not_ignored(image: Path) -> None:
    sources = [source for copy in instructions(image, "COPY") for source in copy.split()[:-1]]
    assert {"pyproject.toml", "skyrl"} <= set(sources)
    assert [source for source in sources if not (ROOT / source).exists()] == []
    assert set(sources) <= set(ignored())


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.name)
def test_the_build_has_the_files_that_the_project_names(image: Path) -> None:
    sources = {source for copy in instructions(image, "COPY") for source in copy.split()[:-1]}
    assert {PROJECT["readme"], *PROJECT["license-files"]} <= sources


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.name)
def test_extras_and_the_command_exist(image: Path) -> None:
    names = [
        extra
        for run in instructions(image, "RUN")
        for extras in re.findall(r'"\.\[(.*?)\]"', run)
        for extra in extras.split(",")
    ]
    assert "train" in names
    assert set(names) <= set(PROJECT["optional-dependencies"])
    assert instructions(image, "ENTRYPOINT") == ['["skyrl"]'] and "skyrl" in PROJECT["scripts"]


def test_torch_of_the_image_for_cpus_is_the_one_that_is_tested() -> None:
    [version] = re.findall(r"torch==(\S+)", " ".join(instructions(IMAGES[0], "RUN")))
    assert f"torch=={version}" in (ROOT / "constraints.txt").read_text().splitlines()


@pytest.mark.needs("hadolint")
@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.name)
def test_hadolint_finds_nothing(image: Path) -> None:
    result = subprocess.run(["hadolint", str(image)], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "")


def test_the_workflow_of_releases_builds_every_image_and_finds_the_version_where_it_looks() -> None:
    workflow = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    assert f"build: [{', '.join(image.name.removesuffix('.Dockerfile') for image in IMAGES)}]" in workflow
    version = re.search(r'grep -Fx "(.*)" (\S+)', workflow)
    assert version is not None
    line = version[1].replace('\\"', '"').replace("${GITHUB_REF_NAME#v}", __version__)
    assert line in (ROOT / version[2]).read_text().splitlines()
