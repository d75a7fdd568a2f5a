"""The wheel works outside of the repository: a folder elsewhere, an environment that has no other skyrl."""

from __future__ import annotations

import os
import re
import shlex
import site
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("wheel")]


def run(*command: str | Path, folder: Path) -> str:
    """Output of a command that succeeds, in `folder` and without the repository's modules."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run([*map(str, command)], cwd=folder, env=environ, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT, folder=folder)
    [path] = folder.glob("skyrl_attrs-*.whl")
    return path


def environment(folder: Path, install: tuple[str, ...], wheel: Path) -> Path:
    """Python of a new environment with the wheel, which takes everything else from this one.

    This environment's folders come by a `.pth` file, whose own `.pth` files are not read: an editable skyrl stays out.
    """
    run(sys.executable, "-m", "venv", folder / "venv", folder=folder)
    python = folder / "venv" / "bin" / "python"
    purelib = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", folder=folder).strip()
    Path(purelib, "others.pth").write_text("\n".join(site.getsitepackages()))
    command = [part.format(python=python, wheel=wheel) for part in install]
    run(*command, folder=folder)
    return python


@pytest.mark.parametrize(
    "install",
    [
        pytest.param(("{python}", "-m", "pip", "install", "--quiet", "--no-deps", "{wheel}"), id="pip"),
        pytest.param(
            ("uv", "pip", "install", "--quiet", "--offline", "--no-deps", "--python", "{python}", "{wheel}"),
            id="uv",
            marks=pytest.mark.needs("uv"),
        ),
    ],
)
def test_a_new_task_of_the_installed_wheel_learns(install: tuple[str, ...], wheel: Path, tmp_path: Path) -> None:
    python = environment(tmp_path, install, wheel)
    skyrl = python.with_name("skyrl")
    where = run(python, "-c", "import skyrl; print(skyrl.__file__)", folder=tmp_path).strip()
    assert Path(where).is_relative_to(tmp_path)
    run(skyrl, "init", "demo", folder=tmp_path)
    last_line = run(skyrl, "run", "run.toml", folder=tmp_path / "demo").splitlines()[-1]
    before, after = map(float, re.findall(r"\d\.\d+", last_line))
    assert before < 0.5 and after > 0.8


@pytest.mark.parametrize("source", ["-e {root}", "{root}", "{wheel}"], ids=["editable", "folder", "wheel"])
def test_a_missing_package_is_installed_from_where_skyrl_came_from(source: str, wheel: Path, tmp_path: Path) -> None:
    source = source.format(root=ROOT, wheel=wheel)
    python = environment(tmp_path, ("{python}", "-m", "pip", "install", "--quiet", "--no-deps", *source.split()), wheel)
    program = "from skyrl.installation import install_command; print(install_command('view'))"
    command = shlex.split(run(python, "-c", program, folder=tmp_path))
    assert command == ["pip", "install", *f"{source}[view]".split()]
    run(python, "-m", *command, "--no-deps", "--dry-run", "--quiet", folder=tmp_path)


def test_schemas_presets_and_templates_come_with_the_wheel(wheel: Path, tmp_path: Path) -> None:
    skyrl = environment(
        tmp_path, ("{python}", "-m", "pip", "install", "--quiet", "--no-deps", "{wheel}"), wheel
    ).with_name("skyrl")
    assert run(skyrl, "config", "schema", folder=tmp_path) == (ROOT / "schemas" / "skyrl.schema.json").read_text()
    (tmp_path / "run.toml").write_text('extends = "preset:cuda"\n')
    assert '"cuda"' in run(skyrl, "config", "show", "run.toml", folder=tmp_path)
    templates = ROOT / "skyrl" / "starter" / "templates"
    ours = {
        f"skyrl/{path.relative_to(ROOT / 'skyrl')}"
        for path in templates.rglob("*.*")
        if path.suffix in (".py", ".toml")
    }
    assert ours <= set(zipfile.ZipFile(wheel).namelist())
