"""`skyrl ckpt`: lists checkpoints, verifies that they are complete, shows their content, and compares two."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from skyrl.cli.command_line.commands import Commands
from skyrl.errors import ResumeError

if TYPE_CHECKING:
    from skyrl.checkpoint.store import Checkpoint, CheckpointStore

MOST = 10
"""Largest number of differing tensors that are listed: weights first, then by size of the difference."""

FOLDER = click.argument("folder", metavar="FOLDER")


@click.group(cls=Commands)
def ckpt() -> None:
    """Inspect checkpoints: list, verify, show, diff.

    FOLDER is a run's folder, the folder of its checkpoints, or one of them (.../global_step_N); the latter two may be
    addresses in an object store.
    """


@ckpt.command(name="list")
@FOLDER
def list_(folder: str) -> None:
    """List checkpoints, one per line: step, size, ranks, and whether all files exist with the right size."""
    store, steps = _found(folder)
    click.echo(f"{store.folder}: {len(steps)} checkpoint{'s' if len(steps) != 1 else ''}")
    for step in steps:
        wrong = store.verify(step, "size")
        click.echo(f"  {step:>8}  {_line(store, step) if not wrong else wrong[0]}")


@ckpt.command()
@FOLDER
def verify(folder: str) -> None:
    """Compare every byte of every file with the manifest. Exit code 1 if anything is missing or damaged."""
    store, steps = _found(folder)
    if not steps:
        raise ResumeError(f"{store.folder} contains no checkpoint")
    wrong = {step: store.verify(step) for step in steps}
    for step in steps:
        click.echo(f"  {step:>8}  {'good' if not wrong[step] else 'damaged'}")
        for line in wrong[step]:
            click.echo(f"            {line}")
    if any(wrong.values()):
        sys.exit(1)


@ckpt.command()
@FOLDER
def show(folder: str) -> None:
    """Show the newest checkpoint, or the named one: files, state, metrics, versions."""
    from skyrl.storage.disk_errors import readable

    store, steps = _found(folder)
    if not steps:
        raise ResumeError(f"{store.folder} contains no checkpoint")
    checkpoint, manifest = store.load(steps[-1]), store.manifest(steps[-1])
    click.echo(f"{store.folder}/global_step_{checkpoint.step}  {_line(store, checkpoint.step)}")
    click.echo(f"  fingerprint  {checkpoint.fingerprint[:16]}")
    click.echo("  versions     " + ", ".join(f"{name} {version}" for name, version in manifest.versions.items()))
    for model, tensors in checkpoint.models.items():
        weights = sum(tensor.numel() for name, tensor in tensors.items() if name.startswith("model."))
        click.echo(f"  {model:<12} {len(tensors)} tensors, {weights:,} weights")
    for file in manifest.files:
        click.echo(f"    {file.name:<40} {readable(file.size):>10}  {file.digest}")
    click.echo("  state")
    for path, value in _flat(_with_long_tables_counted(checkpoint.state)):
        click.echo(f"    {path} = {value if isinstance(value, _Count) else json.dumps(value, ensure_ascii=False)}")
    click.echo("  metrics")
    for name, number in sorted(manifest.metrics.items()):
        click.echo(f"    {name} = {number:g}")


@ckpt.command()
@click.argument("one")
@click.argument("other")
def diff(one: str, other: str) -> None:
    """Show how two checkpoints differ: configuration, state, and the tensors that differ most."""
    from skyrl.checkpoint.store import load_checkpoint

    first, second = (load_checkpoint(_of_one(folder)) for folder in (one, other))
    for title, before, after in (
        ("configuration", first.config, second.config),
        ("state", first.state, second.state),
    ):
        old, new = dict(_flat(before)), dict(_flat(after))
        changed = [path for path in dict.fromkeys([*old, *new]) if old.get(path) != new.get(path)]
        click.echo(f"{title}: {len(changed)} values differ")
        for path in changed:
            click.echo(f"  {path}: {_short(old.get(path))} -> {_short(new.get(path))}")
    for model in dict.fromkeys([*first.models, *second.models]):
        for line in _tensors_that_differ(first, second, model):
            click.echo(line)


def _tensors_that_differ(first: Checkpoint, second: Checkpoint, model: str) -> Iterator[str]:
    import torch

    old, new = first.models.get(model, {}), second.models.get(model, {})
    lines = []
    for name in dict.fromkeys([*old, *new]):
        if name not in old or name not in new or old[name].shape != new[name].shape:
            lines.append(
                (name.startswith("model."), float("inf"), f"  {name}: {_shape(old, name)} -> {_shape(new, name)}")
            )
        elif not torch.equal(old[name], new[name]):
            furthest = (old[name].double() - new[name].double()).abs().max().item()
            lines.append((name.startswith("model."), furthest, f"  {name}: differs by at most {furthest:.3g}"))
    yield f"{model}: {len(lines)} of {len(old.keys() | new.keys())} tensors differ"
    yield from (line for *_, line in sorted(lines, reverse=True)[:MOST])
    if len(lines) > MOST:
        yield f"  and {len(lines) - MOST} more"


def _found(folder: str) -> tuple[CheckpointStore, list[int]]:
    """The store that `folder` refers to, and its steps. Raises `ResumeError`."""
    from skyrl.checkpoint.names import name_of, step_of
    from skyrl.checkpoint.store import CheckpointStore
    from skyrl.runs.stored_runs import checkpoints_of

    step = step_of(folder)
    if step is not None:
        store = CheckpointStore(_of_one(folder).rpartition("/")[0])
        try:
            there = store.storage.names(name_of(step))
        except OSError as error:
            raise ResumeError(f"{folder} cannot be read: {error}") from error
        if not there:
            raise ResumeError(f"there is no checkpoint folder {folder}")
        return store, [step]
    place = checkpoints_of(folder)
    store = CheckpointStore(place)
    steps = store.steps()
    if not steps and "://" not in place and not Path(place).is_dir():
        raise ResumeError(f"there is no folder {place}")
    return store, steps


def _of_one(folder: str) -> str:
    """The absolute name of one checkpoint. Raises `ResumeError` if it is not the name of one."""
    from skyrl.checkpoint.names import step_of

    if step_of(folder) is None:
        raise ResumeError(f"{folder} is not a checkpoint: give a folder .../global_step_N")
    return folder.rstrip("/") if "://" in folder else str(Path(folder).expanduser().absolute())


def _line(store: CheckpointStore, step: int) -> str:
    from skyrl.storage.disk_errors import readable

    manifest = store.manifest(step)
    ranks = ", ".join(
        f"{model} on {size} rank{'s' if size != 1 else ''}" for model, size in manifest.world_size.items()
    )
    return f"{readable(manifest.size):>9}  {ranks}"


def _flat(data: object, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(data, Mapping) and data:
        for name, value in data.items():
            yield from _flat(value, f"{path}.{name}" if path else str(name))
    else:
        yield path, data


class _Count(str):
    """Placeholder for a table that is too long to print."""


def _with_long_tables_counted(data: object) -> Any:
    """The data with every table of more than `MOST` values, such as digests of data parts, replaced by its length."""
    if not isinstance(data, Mapping):
        return data
    if len(data) > MOST and not any(isinstance(value, Mapping) for value in data.values()):
        return _Count(f"({len(data)} values)")
    return {name: _with_long_tables_counted(value) for name, value in data.items()}


def _shape(tensors: Mapping[str, Any], name: str) -> str:
    return str(tuple(tensors[name].shape)) if name in tensors else "nothing"


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
