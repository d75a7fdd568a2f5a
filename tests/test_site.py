"""The documentation site has every page of the repository, in one place of its navigation. `make site` builds it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from website import build


def listed(entries: list[Any]) -> list[str]:
    """The pages of a part of the navigation."""
    paths: list[str] = []
    for entry in entries:
        target = next(iter(entry.values())) if isinstance(entry, dict) else entry
        paths += listed(target) if isinstance(target, list) else [target]
    return paths


def test_every_page_is_once_in_the_navigation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "PAGES", tmp_path)
    build.copy_pages()
    config = yaml.safe_load((build.WEBSITE / "mkdocs.yml").read_text(encoding="utf-8"))
    pages = Counter(listed(build.with_folders(config["nav"])))
    written = [page for suffix in ("md", "ipynb") for page in tmp_path.rglob(f"*.{suffix}")]
    assert pages == Counter(str(page.relative_to(tmp_path)) for page in written)
    assert len(pages) > 80


def test_a_link_to_a_folder_leads_to_its_page_and_one_to_a_file_has_that_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file, text in {
        "README.md": "# T\n\nA library\nof parts.\n",
        "docs/README.md": "# D\n\n## Start\n\n| page | has |\n| [a](guide.md), [b](../examples/a/README.md) | x |\n",
        "docs/guide.md": "[a](../examples/a) [b](../examples/a/run.toml) [c](../skyrl) [d](http://x) [e](other.md#x)",
        "docs/other.md": "# X",
        "examples/a/README.md": "# A",
        "examples/a/run.toml": "kind = 'rl'",
        "skyrl/code.py": "",
        "website/api.md": "# API",
    }.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    for name, path in {"ROOT": tmp_path, "WEBSITE": tmp_path / "website", "PAGES": tmp_path / "pages"}.items():
        monkeypatch.setattr(build, name, path)
    build.copy_pages()
    text = (tmp_path / "pages/docs/guide.md").read_text()
    assert text == "[a](../examples/a/README.md) [b](../examples/a/run.toml) c [d](http://x) [e](other.md#x)"
    copies = {str(path.relative_to(tmp_path / "pages")) for path in (tmp_path / "pages").rglob("*") if path.is_file()}
    assert copies == {
        "README.md",
        "docs/README.md",
        "docs/api.md",
        "docs/guide.md",
        "docs/other.md",
        "examples/a/README.md",
        "examples/a/run.toml",
        "llms.txt",
    }
    assert (tmp_path / "pages/llms.txt").read_text() == (
        "# skyrl\n\n> A library of parts.\n\n## Start\n\n- [a](docs/guide/), [b](examples/a/): x\n"
    )
