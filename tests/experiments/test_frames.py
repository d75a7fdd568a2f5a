"""How deep the optimizer lies below the command: functions of ours that are under way while it steps."""

from __future__ import annotations

import ast
import asyncio
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, CoroutineType, FrameType
from typing import Any

import pytest
from torch.optim.optimizer import register_optimizer_step_pre_hook

import skyrl
from skyrl.cli import start
from skyrl.processes.signals import handled_signals
from tests.nano_run import overrides
from tests.supervised_run import settings, toml_file

PACKAGE = Path(skyrl.__file__).parent
MOST = 17


def stack() -> Iterator[CodeType]:
    """What the interpreter runs now, the innermost first."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


def awaiting(task: asyncio.Task[Any]) -> Iterator[CodeType]:
    """The coroutines of a task that wait for each other, the outermost first."""
    coroutine: object = task.get_coro()
    while isinstance(coroutine, CoroutineType):
        yield coroutine.cr_code
        coroutine = coroutine.cr_await


def ours(codes: Iterator[CodeType]) -> list[CodeType]:
    """Those of the package; a comprehension is part of its function."""
    return [code for code in codes if PACKAGE in Path(code.co_filename).parents and not code.co_name.startswith("<")]


def deepest_step(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> list[CodeType]:
    """Functions of ours between `skyrl run` and the first step of the optimizer."""
    stacks: list[list[CodeType]] = []

    def look(*_: Any) -> None:
        waiting = [
            code for task in asyncio.all_tasks() if task is not asyncio.current_task() for code in awaiting(task)
        ]
        stacks.append(ours(iter([*stack(), *waiting])))

    monkeypatch.setattr(sys, "argv", ["skyrl", "run", *arguments])
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    hook = register_optimizer_step_pre_hook(look)
    handlers = {number: signal.getsignal(number) for number in handled_signals()}
    try:
        with pytest.raises(SystemExit) as end:
            start()
    finally:
        hook.remove()
        for number, handler in handlers.items():  # a command ignores them once it has ended, as its process does
            signal.signal(number, handler)
    assert end.value.code == 0
    return stacks[0]


def untyped(codes: list[CodeType]) -> list[str]:
    """Those whose signature has a bare `Any`."""
    functions = []
    for code in codes:
        tree = ast.parse(Path(code.co_filename).read_text())
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == code.co_name:
                arguments = node.args
                every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
                every += [argument for argument in (arguments.vararg, arguments.kwarg) if argument is not None]
                annotations = [argument.annotation for argument in every] + [node.returns]
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                if first == code.co_firstlineno and any(
                    isinstance(annotation, ast.Name) and annotation.id == "Any" for annotation in annotations
                ):
                    functions.append(code.co_qualname)
    return functions


def named(codes: list[CodeType]) -> list[str]:
    return [code.co_qualname for code in codes]


def test_the_optimizer_of_a_policy_lies_seventeen_functions_below_the_command_and_all_are_typed(
    nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = overrides(nano, tmp_path, trainer__max_training_steps=1, trainer__eval_interval=-1)
    file = toml_file(tmp_path / "run.toml", values)
    codes = deepest_step(monkeypatch, [file])
    assert {"start", "PPOTrainer.step", "Fsdp2.step"} <= set(named(codes))
    assert len(codes) <= MOST, "\n".join(named(codes))
    assert untyped(codes) == []


def test_a_supervised_run_is_no_deeper(nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = toml_file(tmp_path / "run.toml", settings(nano, tmp_path, "sft", num_steps=1))
    codes = deepest_step(monkeypatch, [file])
    assert {"start", "TrainingLoop.run", "Fsdp2.step"} <= set(named(codes))
    assert len(codes) <= MOST, "\n".join(named(codes))
    assert untyped(codes) == []
