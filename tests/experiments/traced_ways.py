"""The ways of `docs/architecture.md`: the modules that an argument, a prompt, a batch and a weight pass.

A reader follows a call, and reads each function once, where it is called first. A module is *entered* with the first of
its functions, and *entered again* with each later one that is called when no function of the module is under way any
more. Comprehensions and lambdas are part of their functions. Rules, checks, effects, and what a field brings of its own
(validator, converter) are called by plain loops over a registry: they count to the loop, and so does what they call.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import ParamSpec, TypeVar

import pytest
from attrs import define, field

from skyrl.config import compose
from skyrl.experiments.ppo import BasePPOExp
from skyrl.learners.workers.group import LearnerGroup
from skyrl.rollout.batches import SynchronousRollouts
from skyrl.weight_sync.transports import SharedTransport
from tests.nano_run import config

P = ParamSpec("P")
R = TypeVar("R")

ROOT = Path(__file__).parents[2]
REGISTERED = (
    "skyrl.config.derive.",
    "skyrl.config.checks.",
    "skyrl.config.effects.",
    "skyrl.config.settings.",
    "skyrl.config.foundation.intervals",
    "skyrl.tree.validators",
)

MOST_MODULES, MOST_ENTERED_AGAIN = 14, 15

PACKAGES = {
    "prompt": ("rollout", "envs", "inference", "data", "chats", "trajectory"),
    "batch": ("learners", "models", "algorithms", "training.objective", "batch", "planning"),
    "weight": ("weight_sync", "weight_receiver", "learners", "models", "inference"),
}
"""What is on each way. Layers around the calls, as timing, and other threads, as those that write files, are not."""


def module_of(frame: FrameType) -> str:
    """The module of skyrl whose function runs in the frame; empty for code of others and of attrs."""
    module = str(frame.f_globals.get("__name__", ""))
    is_ours = module.startswith("skyrl.") and not frame.f_code.co_filename.startswith("<attrs")
    return module if is_ours else ""


def callers(frame: FrameType) -> Iterator[str]:
    """The modules under way, the innermost first."""
    above = frame.f_back
    while above is not None:
        yield module_of(above)
        above = above.f_back


@define
class Way:
    """Functions in the order of their first calls: where each is, and whether its module was under way already."""

    functions: dict[tuple[str, str], bool] = field(factory=dict)

    def see(self, frame: FrameType, event: str, argument: object) -> None:
        module, function = module_of(frame), (module_of(frame), frame.f_code.co_qualname)
        if event != "call" or not module or frame.f_code.co_name.startswith("<") or function in self.functions:
            return
        under_way = [module, *callers(frame)]
        if not any(name.startswith(REGISTERED) for name in under_way):
            self.functions[function] = module in under_way[1:]

    @property
    def modules(self) -> list[str]:
        """Modules in the order in which they are entered."""
        return list(dict.fromkeys(module.removeprefix("skyrl.") for module, _ in self.functions))

    @property
    def entered_again(self) -> list[str]:
        repeats: list[str] = []
        entered: list[str] = []
        for (module, name), is_under_way in self.functions.items():
            if module in entered and module != entered[-1] and not is_under_way:
                repeats.append(f"{module}: {name}")
            entered.append(module)
        return repeats


def rows(heading: str) -> list[list[str]]:
    """Cells of the table below a heading of the page, without code marks."""
    page = (ROOT / "docs/architecture.md").read_text()
    section = page.partition(f"### {heading}\n")[2].partition("\n## ")[0].partition("\n### ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in lines]


def numbers(heading: str) -> list[int]:
    """Numbers in the text below a heading of the page, before its table."""
    page = (ROOT / "docs/architecture.md").read_text()
    return [int(word) for word in re.findall(r"\b\d+\b", page.partition(f"### {heading}\n")[2].partition("\n|")[0])]


def test_an_argument_passes_the_modules_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    words = ["trainer.seed=3", "trainer.policy.optimizer_config.lr=1e-5", "generator.sampling_params.temperature=0.9"]
    compose(["examples/quickstart/grpo.toml"], words, environ=os.environ)  # what is remembered of a class is once
    trace = Way()
    sys.setprofile(trace.see)
    try:
        compose(["examples/quickstart/grpo.toml"], words, environ=os.environ)
    finally:
        sys.setprofile(None)
    assert trace.modules == [row[0].removesuffix(".py").replace("/", ".") for row in rows("The path of an argument")]
    assert len(trace.modules) <= MOST_MODULES
    assert len(trace.entered_again) <= MOST_ENTERED_AGAIN, "\n".join(trace.entered_again)
    assert numbers("The path of an argument") == [len(trace.modules), len(trace.entered_again)]


@define
class Ways:
    """The modules that calls pass, with those of other tasks and threads that run meanwhile."""

    modules: dict[str, dict[str, None]] = field(factory=lambda: {name: {} for name in PACKAGES})
    under_way: set[str] = field(factory=set)

    def see(self, frame: FrameType, event: str, argument: object) -> None:
        module = module_of(frame).removeprefix("skyrl.") if event == "call" and self.under_way else ""
        for kind in self.under_way if module else ():
            if any(f"{module}.".startswith(f"{package}.") for package in PACKAGES[kind]):
                self.modules[kind].setdefault(module)

    def during(self, kind: str, call: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R]]:
        async def followed(*inputs: P.args, **named: P.kwargs) -> R:
            self.under_way.add(kind)
            try:
                return await call(*inputs, **named)
            finally:
                self.under_way.remove(kind)

        return followed

    @contextmanager
    def followed(self) -> Iterator[None]:
        threading.setprofile(self.see)
        sys.setprofile(self.see)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)


def test_prompts_batches_and_weights_pass_the_modules_of_the_table(
    nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traces = Ways()
    for owner, method, kind in (
        (SynchronousRollouts, "next_batch", "prompt"),
        (LearnerGroup, "forward_backward", "batch"),
        (LearnerGroup, "optimizer_step", "batch"),
        (SharedTransport, "send", "weight"),
    ):
        monkeypatch.setattr(owner, method, traces.during(kind, getattr(owner, method)))
    run = BasePPOExp(config(nano, tmp_path, trainer__max_training_steps=1, trainer__eval_interval=-1))
    with traces.followed():
        run.run()
    expected = {
        row[0]: (row[1].split(" → "), int(row[2])) for row in rows("The paths of a prompt, a batch and a weight")
    }
    assert expected.keys() == PACKAGES.keys()
    for kind, (modules, most) in expected.items():
        passed = [module.replace(".", "/") for module in traces.modules[kind]]
        assert [module for module in passed if module in modules] == modules, kind
        assert len(passed) <= most, (kind, passed)
