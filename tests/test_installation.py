"""Install commands name this distribution, from where it was installed; pages and messages name no other."""

from __future__ import annotations

import ast
import json
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from skyrl import installation
from skyrl.cli.main import cli
from skyrl.installation import conflict, install_command, installed, package_command

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OURS, THEIRS = "skyrl = skyrl.cli:start", "skyrl = skyrl.train.entrypoints.main_base:main"

COMMIT = "0123456789abcdef0123456789abcdef01234567"
WHEEL = "skyrl_attrs-0.1.0-py3-none-any.whl"
GIT: dict[str, Any] = {"url": "https://host/a/b.git", "vcs_info": {"vcs": "git", "commit_id": COMMIT}}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder of distributions; the code lies in it, and no checkout."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.setattr(sys, "path", [str(folder)])
    monkeypatch.setattr(installation, "__file__", str(folder / "skyrl" / "installation.py"))
    return folder


def install(site: Path, name: str, origin: object = None, *, command: str = OURS, installer: str = "pip") -> None:
    """The metadata that an installer leaves."""
    folder = site / f"{name.replace('-', '_')}-0.1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: 0.1.0\n")
    (folder / "entry_points.txt").write_text(f"[console_scripts]\n{command}\n")
    (folder / "INSTALLER").write_text(f"{installer}\n")
    if origin is not None:
        (folder / "direct_url.json").write_text(origin if isinstance(origin, str) else json.dumps(origin))


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        ({"url": "file:///src/skyrl", "dir_info": {"editable": True}}, "pip install -e '/src/skyrl[view]'"),
        ({"url": "file:///my%20code", "dir_info": {"editable": True}}, "pip install -e '/my code[view]'"),
        ({"url": "file:///it%27s", "dir_info": {"editable": True}}, """pip install -e '/it'"'"'s[view]'"""),
        ({"url": "file:///src/skyrl", "dir_info": {}}, "pip install '/src/skyrl[view]'"),
        ({"url": "file:///src/skyrl", "dir_info": {"editable": False}}, "pip install '/src/skyrl[view]'"),
        ({"url": f"file:///dist/{WHEEL}", "archive_info": {"hash": "sha256=1"}}, f"pip install '/dist/{WHEEL}[view]'"),
        ({"url": f"https://host/{WHEEL}", "archive_info": {}}, f"pip install 'skyrl-attrs[view] @ https://host/{WHEEL}'"),
        (GIT, f"pip install 'skyrl-attrs[view] @ git+https://host/a/b.git@{COMMIT}'"),
        (
            {**GIT, "url": "file:///a/b.git", "subdirectory": "python"},
            f"pip install 'skyrl-attrs[view] @ git+file:///a/b.git@{COMMIT}#subdirectory=python'",
        ),
        (
            {"url": "https://host/all.zip", "archive_info": {}, "subdirectory": "python"},
            "pip install 'skyrl-attrs[view] @ https://host/all.zip#subdirectory=python'",
        ),
        (None, "pip install 'skyrl-attrs[view]'"),
        ("{broken", "pip install 'skyrl-attrs[view]'"),
    ],
)  # fmt: skip
def test_the_command_installs_from_where_this_came_from(origin: object, command: str, site: Path) -> None:
    install(site, "skyrl-attrs", origin)
    assert install_command("view") == command
    assert install_command("view", "report") == command.replace("[view]", "[view,report]")
    assert shlex.split(install_command()) == [word.replace("[view]", "") for word in shlex.split(command)]


def test_an_installation_by_uv_is_extended_by_uv(site: Path) -> None:
    install(site, "skyrl-attrs", {"url": "file:///src", "dir_info": {"editable": True}}, installer="uv")
    assert install_command("view") == "uv pip install -e '/src[view]'"
    assert package_command("sglang") == "uv pip install sglang"


def test_a_checkout_that_is_not_installed_is_named_by_its_folder(
    tmp_path: Path, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pyproject.toml").write_text("")
    monkeypatch.setattr(installation, "__file__", str(tmp_path / "skyrl" / "installation.py"))
    assert installed() is None
    assert install_command("train") == f"pip install -e '{tmp_path}[train]'"


def test_the_other_project_of_the_name_is_not_taken_for_this_one(site: Path) -> None:
    install(site, "skyrl", {"url": "file:///theirs", "dir_info": {"editable": True}}, command=THEIRS)
    assert (installed(), install_command("view")) == (None, "pip install 'skyrl-attrs[view]'")


def test_an_installation_from_before_the_name_changed_is_this_one(site: Path) -> None:
    install(site, "skyrl", {"url": "file:///ours", "dir_info": {"editable": True}})
    assert install_command("view") == "pip install -e '/ours[view]'"


@pytest.mark.parametrize("command", [OURS, THEIRS])
def test_two_distributions_of_one_package_are_told_with_the_remedy(command: str, site: Path) -> None:
    install(site, "skyrl-attrs", {"url": "file:///src", "dir_info": {"editable": True}})
    assert conflict() == ""
    install(site, "skyrl", command=command)
    assert "pip uninstall skyrl skyrl-attrs && pip install -e /src" in conflict()


def test_a_distribution_with_a_longer_name_is_no_conflict(site: Path) -> None:
    for name in ("skyrl-attrs", "skyrl-gym", "skyrl-tx", "skyrlx"):
        install(site, name)
    (site / "skyrl").mkdir()
    assert conflict() == ""


def test_the_command_warns_once_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site-packages"
    site.mkdir()
    monkeypatch.syspath_prepend(site)
    install(site, "skyrl-attrs", {"url": "file:///src", "dir_info": {"editable": True}})
    install(site, "skyrl", command=THEIRS)
    result = CliRunner().invoke(cli, ["config", "show", "trainer.epochs=3"])
    assert result.exit_code == 0
    assert result.stderr.count("are both installed") == 1
    assert json.loads(result.stdout)["trainer"]["epochs"] == 3


# What pages and messages say


FOLDERS = (".ci", ".github", "benchmarks", "docker", "docs", "examples", "schemas", "skyrl")


def pages() -> Iterator[Path]:
    """Files of the repository that people read and run, the record of past changes apart."""
    yield from (path for path in ROOT.iterdir() if path.suffix in (".md", ".toml", ".txt") or path.name == "Makefile")
    for folder in FOLDERS:
        yield from (path for path in (ROOT / folder).rglob("*") if path.is_file() and path.suffix != ".pyc")


INSTALLING = re.compile(
    r"\b(?:pip3?|pipx|uv)(?: -\S+)* (?:(?:pip|tool) )?(?:install|add|wheel|download)\b([^\n`;|&)]*)"
)
OTHERS_NAME = re.compile(r"""(?<![\w./-])skyrl(?:\[[\w,]*\])?(?=$|[\s",.;:=<>~!\]]|'(?!s))""")
"""The distribution `skyrl`, with or without extras: `skyrl-gym` and `skyrl-attrs` are others."""


@pytest.mark.parametrize(
    ("text", "is_theirs"),
    [
        ("pip install 'skyrl[view]'", True),
        ("pip install skyrl", True),
        ('uv pip install -U "skyrl==0.1"', True),
        ("uv add skyrl", True),
        ("python -m pip install --quiet torch skyrl[train,ray]", True),
        ("pip install 'skyrl-attrs[view]'", False),
        ("pip install -e '.[train]'", False),
        ("pip install skyrl-gym", False),
        ("pip install ./skyrl", False),
    ],
)
def test_commands_that_would_fetch_the_other_project_are_found(text: str, is_theirs: bool) -> None:
    assert bool(fetched(text)) is is_theirs


def fetched(text: str) -> list[str]:
    """Install commands in a text that name the other project, and extras of it."""
    commands = [match[0] for match in INSTALLING.finditer(text) if OTHERS_NAME.search(match[1])]
    return [*commands, *re.findall(r"(?<![\w./-])skyrl\[\w[\w,]*\]", text)]


def test_no_page_and_no_message_installs_the_other_project() -> None:
    texts = {path: path.read_text(errors="replace") for path in pages() if path.name != "CHANGELOG.md"}
    assert len(texts) > 500
    assert {str(path.relative_to(ROOT)): packages for path, text in texts.items() if (packages := fetched(text))} == {}


def nodes(*words: str) -> Iterator[tuple[Path, ast.AST]]:
    """Every node of the modules whose text has one of the words."""
    for path in (ROOT / "skyrl").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if any(word in text for word in words):
            yield from ((path, node) for node in ast.walk(ast.parse(text)))


ELSEWHERE = {"skyrl/interop/skyrl/programs.py"}
"""What a converted run needs, on the machine that it will run on."""


def test_messages_take_their_install_commands_from_this_installation() -> None:
    written = {
        str(path.relative_to(ROOT))
        for path, node in nodes("pip install ")
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.search(r"pip install \S", node.value)
    }
    assert written == ELSEWHERE


def test_messages_name_extras_that_exist() -> None:
    positions = {"install_command": slice(None), "require_packages": slice(1, 2)}
    named = {
        argument.value
        for _, node in nodes(*positions)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in positions
        for argument in node.args[positions[node.func.id]]
        if isinstance(argument, ast.Constant)
    }
    assert {"train", "view", "ray", "vllm", "s3", "math"} <= named
    assert named <= set(PROJECT["optional-dependencies"])


def test_extras_that_pages_install_exist() -> None:
    names = {
        extra
        for path in pages()
        if path.suffix in (".md", ".txt", ".Dockerfile") or path.name == "Makefile"
        for extras in re.findall(r"(?:\.|skyrl-attrs)\[([a-z][a-z0-9,]*)\]", path.read_text(encoding="utf-8"))
        for extra in extras.split(",")
    }
    assert {"train", "dev", "mlflow"} <= names <= set(PROJECT["optional-dependencies"])


def test_the_distribution_is_named_in_one_way() -> None:
    assert PROJECT["name"] == installation.DISTRIBUTION
    needs = [need for extra in PROJECT["optional-dependencies"].values() for need in extra]
    assert {re.split(r"[\[<>=]", need)[0] for need in needs if need.startswith("skyrl")} == {"skyrl-attrs", "skyrl-gym"}
