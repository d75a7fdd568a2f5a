"""Builds the documentation site from the pages of the repository: `make site`; `make site ARGS=serve` shows it live.

The pages stay where they are and link to each other by files. Here they are copied into one folder with the same
paths, so that every link of a page also leads somewhere on the site, and MkDocs makes the site of that folder. Files
that pages link to, such as configurations, are copied too.

Needs `pip install -r website/requirements.txt`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
WEBSITE = ROOT / "website"
PAGES = WEBSITE / "pages"
"""The copies, which nobody edits."""

LINK = re.compile(r"(!?\[[^\]]*\])\(([^)\s#]+)(#[^)\s]+)?\)")


def pages() -> list[Path]:
    """All pages, relative to the repository: those of its folders of documentation, and what they link to."""
    patterns = ("*.md", "docs/**/*.md", "examples/**/*.md", "benchmarks/*.md")
    found = [page.relative_to(ROOT) for pattern in patterns for page in sorted(ROOT.glob(pattern))]
    for page in found:  # which grows
        found += [target for target in dict.fromkeys(targets(page)) if target.suffix == ".md" and target not in found]
    return found


def targets(page: Path) -> Iterator[Path]:
    """Files that a page links to, relative to the repository."""
    for _, target, _ in LINK.findall((ROOT / page).read_text(encoding="utf-8")):
        there = (ROOT / page.parent / target).resolve()
        if ":" not in target and there.is_file():
            yield there.relative_to(ROOT)


def with_pages_for_folders(text: str, page: Path) -> str:
    """The text with links to folders turned into links to their README, where a folder has one."""

    def turned(link: re.Match[str]) -> str:
        name, target, anchor = link[1], link[2], link[3] or ""
        there = ROOT / page.parent / target
        if ":" in target or not there.is_dir():
            return link[0]
        readme = there / "README.md"
        return f"{name}({target.rstrip('/')}/README.md{anchor})" if readme.exists() else name.strip("![]")

    return LINK.sub(turned, text)


def copy_pages() -> None:
    """Fill the folder that MkDocs reads."""
    shutil.rmtree(PAGES, ignore_errors=True)
    for page in pages():
        copy = PAGES / page
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(with_pages_for_folders((ROOT / page).read_text(encoding="utf-8"), page), encoding="utf-8")
        for target in targets(page):
            if target.suffix != ".md":
                (PAGES / target).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / target, PAGES / target)
    shutil.copyfile(WEBSITE / "api.md", PAGES / "docs" / "api.md")
    (PAGES / "llms.txt").write_text(pages_for_models(), encoding="utf-8")


def pages_for_models() -> str:
    """`llms.txt` (llmstxt.org): what the library is, and the pages of the index with what each has."""
    readme, index = ((ROOT / page).read_text(encoding="utf-8") for page in ("README.md", "docs/README.md"))
    summary = " ".join(readme.split("\n\n")[1].split())
    lines = ["# skyrl", "", f"> {summary}"]
    for section in index.split("\n## ")[1:]:
        lines += ["", f"## {section.splitlines()[0]}", ""]
        for cells, about in re.findall(r"^\| (\[.+) \| (.+) \|$", section, re.MULTILINE):
            named = re.findall(r"\[(.+?)\]\((.+?)\)", cells)
            links = ", ".join(f"[{name}]({address(target)})" for name, target in named)
            lines.append(f"- {links}: {about}")
    return "\n".join(lines) + "\n"


def address(target: str) -> str:
    """Where the site has a page that `docs/README.md` links to."""
    page = (ROOT / "docs" / target).resolve().relative_to(ROOT).with_suffix("")
    return f"{page.parent if page.name == 'README' else page}/"


def with_folders(entries: list[Any]) -> list[Any]:
    """Entries of MkDocs' `nav`, with folders replaced by their pages: README first, folders last."""
    result = []
    for entry in entries:
        if isinstance(entry, str):  # a page that gives its section its page
            result.append(entry)
            continue
        [(title, target)] = entry.items()
        if isinstance(target, list):
            result.append({title: with_folders(target)})
        elif target.endswith((".md", ".ipynb")):
            result.append(entry)
        else:
            result.append({title: pages_of(PAGES / target)})
    return result


def pages_of(folder: Path) -> list[Any]:
    """The pages of a folder for `nav`."""
    files = sorted(folder.glob("*.md"), key=lambda page: (page.name != "README.md", page.name))
    inner = [{path.name: pages_of(path)} for path in sorted(folder.iterdir()) if path.is_dir()]
    return [*(str(page.relative_to(PAGES)) for page in files), *inner]


def main() -> int:
    """Build the site into `website/site`, or do what the arguments of MkDocs say. Returns its exit code."""
    copy_pages()
    config = yaml.safe_load((WEBSITE / "mkdocs.yml").read_text(encoding="utf-8"))
    whole = WEBSITE / "mkdocs.whole.yml"
    whole.write_text(yaml.safe_dump(config | {"nav": with_folders(config["nav"])}, sort_keys=False), encoding="utf-8")
    command = [sys.executable, "-m", "mkdocs", *(sys.argv[1:] or ["build", "--strict"]), "--config-file", str(whole)]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
