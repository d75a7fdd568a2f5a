"""What both test roots share: the folder of facts, which tests run, and how Hypothesis searches."""

from __future__ import annotations

import argparse
import atexit
import gc
import os
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Runs record the code that they start with in the user's state folder, which tests leave alone.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="skyrl-tests-state-")
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)

# Set before anything imports torch or transformers.
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test that needs a network is not one
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # ranks that wait leave their core to others
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the workers share the cores already

# No test may fail because a machine is slow, so Hypothesis measures no time.
settings.register_profile(
    "skyrl", max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("long", parent=settings.get_profile("skyrl"), max_examples=3_000)
settings.load_profile("skyrl")


def _folder(text: str) -> Path:
    """An existing folder, as an absolute path: a test may change the working directory."""
    folder = Path(text).resolve()
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"{folder} is not a folder")
    return folder


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds --reference, --long and --record-guarantees."""
    parser.addoption(
        "--reference",
        type=_folder,
        default=Path(__file__).parent / "tests" / "reference",
        metavar="DIR",
        help="take the reference cases from this folder: files of the same names and formats as in tests/reference "
        "(write --reference=DIR; pytest reads a separate DIR as a test path when it looks for its own settings)",
    )
    parser.addoption(
        "--kills", type=int, metavar="N", help="kill runs of each kind this often (test_kills_of_kinds.py)"
    )
    parser.addoption("--seed", type=int, default=1, metavar="N", help="draw kills and settings from this seed")
    parser.addoption("--long", action="store_true", help="run the tests marked long, too")
    parser.addoption(
        "--record-guarantees", action="store_true", help="store what the tests of docs/guarantees.md have shown"
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collects without looking for garbage: what is made here, modules and 12,000 tests, lasts as long as the process,
    and going through it again and again takes a quarter of the time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is long, unless asked for, and skips what needs a GPU or a browser where there is none."""
    if not config.getoption("--long"):
        chosen, left_out = list[pytest.Item](), list[pytest.Item]()
        for item, is_long in zip(items, _are_long(items), strict=True):
            (left_out if is_long else chosen).append(item)
        items[:] = chosen
        if left_out:
            config.hook.pytest_deselected(items=left_out)
    for item, needed in _without_gpus(items):
        item.add_marker(pytest.mark.skip(reason=f"needs CUDA devices: {needed}"))
    if why := _why_no_machines():
        for item in items:
            if item.get_closest_marker("machines"):
                item.add_marker(pytest.mark.skip(reason=f"needs network namespaces: {why}"))
    for item, why in _without_eight_bits(items):
        item.add_marker(pytest.mark.skip(reason=why))
    for item, missing in _without_programs(items):
        item.add_marker(pytest.mark.skip(reason=f"needs {missing}"))
    if not all(map(shutil.which, BROWSER)):
        for item in items:
            if item.get_closest_marker("browser"):
                item.add_marker(pytest.mark.skip(reason=f"needs {' and '.join(BROWSER)}"))


def _are_long(items: list[pytest.Item]) -> Iterator[bool]:
    """Whether only --long runs each item: it is marked long, or of the cases of a sampled test another one is drawn."""
    cases: Counter[str] = Counter()
    for item in items:
        sampled = item.get_closest_marker("sampled")
        if item.get_closest_marker("long"):
            yield True
        elif sampled:
            name = item.nodeid.partition("[")[0]
            yield cases[name] % sampled.args[0] > 0
            cases[name] += 1
        else:
            yield False


BROWSER = ("chromium", "chromedriver")
"""Programs that the tests marked browser start. Debian has them in `chromium-driver`."""


def _why_no_machines() -> str:
    """What lacks for the tests marked machines; empty where nothing does."""
    if os.geteuid() != 0:
        return "the tests run as an ordinary user"
    if missing := [name for name in ("ip", "unshare") if not shutil.which(name)]:
        return f"there is no {missing[0]}"
    return "" if os.access("/dev/net/tun", os.W_OK) else "there is no /dev/net/tun"


def _without_programs(items: list[pytest.Item]) -> Iterator[tuple[pytest.Item, str]]:
    """The items marked needs that this machine lacks a program for, and the programs."""
    for item in items:
        mark = item.get_closest_marker("needs")
        missing = [name for name in mark.args if not shutil.which(name)] if mark else []
        if missing:
            yield item, " and ".join(missing)


def _without_gpus(items: list[pytest.Item]) -> Iterator[tuple[pytest.Item, int]]:
    """The items marked gpu that need more than this machine has, and how many; torch is imported only for them."""
    marks = [(item, item.get_closest_marker("gpu")) for item in items]
    needed = [(item, int(mark.args[0]) if mark.args else 1) for item, mark in marks if mark]
    if needed:
        import torch

        there = torch.cuda.device_count()
        yield from ((item, count) for item, count in needed if count > there)


def _without_eight_bits(items: list[pytest.Item]) -> Iterator[tuple[pytest.Item, str]]:
    """The items marked vnni, and why the engine refuses to compute in eight bits here; the engine is imported only for
    them.
    """
    if marked := [item for item in items if item.get_closest_marker("vnni")]:
        import torch

        from skyrl.errors import ModelError
        from skyrl.inference.torch.projections import refuse_without_kernels

        try:
            refuse_without_kernels(torch.device("cpu"))
        except ModelError as refusal:
            yield from ((item, str(refusal)) for item in marked)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Gives tests with the same mark xdist_group to one process of `pytest -n`."""
    from tests.workers import group_scheduling

    return group_scheduling(config, log)


_CRASHED: list[str] = []


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Notes how a process of `pytest -n` ended that should not have ended, for the summary."""
    if error:
        status = node.gateway._io.popen.wait(timeout=60)
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with {status}"
        _CRASHED.append(f"{node.gateway.id} {how}")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Notes which tier of the sandbox a test is about, for the summary."""
    params: dict[str, object] = getattr(getattr(item, "callspec", None), "params", {})
    for name in {"made", "tier", "equal"} & params.keys():
        item.user_properties.append(("sandbox tier", params[name]))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says what depends on the machine: sandbox tiers, full disks and cut networks that were tested, and what lacks."""
    reports = [report for name in ("passed", "failed") for report in terminalreporter.stats.get(name, [])]
    if terminalreporter.config.getoption("--record-guarantees"):
        _record_guarantees(terminalreporter)
    noted = Counter(pair for report in reports for pair in report.user_properties if pair[0] in MACHINE)
    skipped = len(terminalreporter.stats.get("skipped", []))
    if _CRASHED:
        terminalreporter.section("processes of pytest that crashed")
        terminalreporter.line("\n".join(_CRASHED))
    if noted or skipped:
        terminalreporter.section("what this machine has")
        for (what, which), count in sorted(noted.items()):
            terminalreporter.line(f"{what} {which}: {count} tests")
        for line in _lacks(bool(noted), skipped):
            terminalreporter.line(line)


def _record_guarantees(reporter: pytest.TerminalReporter) -> None:
    from tests import guarantees

    nodes = {name: [report.nodeid for report in reporter.stats.get(name, [])] for name in ("passed", "failed", "error")}
    guarantees.record(nodes["passed"], nodes["failed"] + nodes["error"], f"{datetime.now(UTC):%Y-%m-%d}")


MACHINE = {"sandbox tier", "full disk", "network cut"}
"""Properties of tests that the summary counts."""


def _lacks(sandbox: bool, skipped: int) -> Iterator[str]:
    """What was not tested for want of something; the sandbox is asked only where it was tested at all."""
    if sandbox:
        from skyrl.sandbox.sandbox import why_unavailable
        from skyrl.sandbox.tiers import TIERS

        for tier in TIERS:
            if why := why_unavailable(tier):
                yield f"NOT TESTED: sandbox tier {tier}: {why}"
        yield from _lacks_for_root()
    if skipped:
        yield f"NOT TESTED: {skipped} tests that need CUDA devices, a browser, network namespaces or VNNI"


def _lacks_for_root() -> Iterator[str]:
    """Tests of sandboxes that need root, and control groups."""
    from skyrl.sandbox.memory_groups import MemoryGroups

    if os.geteuid() != 0:
        yield "NOT TESTED: sandboxes of a run as root: the tests run as an ordinary user"
    groups = MemoryGroups()
    group = groups.take(1 << 30)
    groups.give_back(group)
    groups.close()
    if group is None:
        yield "NOT TESTED: control groups of sandboxes: this user may make none on this machine"


@pytest.fixture(scope="session")
def reference(pytestconfig: pytest.Config) -> Path:
    """The folder that reference cases are read from: tests/reference, or what --reference names."""
    folder: Path = pytestconfig.getoption("--reference")
    return folder
