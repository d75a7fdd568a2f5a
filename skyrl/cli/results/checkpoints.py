"""`skyrl ckpt`: lists checkpoints, verifies that they are complete, shows their content, and compares two."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from skyrl.cli.command_line.commands import Commands, examples
from skyrl.cli.command_line.json_output import json_option, print_result
from skyrl.errors import ResumeError

if TYPE_CHECKING:
    from torch import Tensor

    from skyrl.checkpoint.store import CheckpointStore

MOST = 10
"""Largest number of differing tensors that are listed: weights first, then by size of the difference."""

FOLDER = click.argument("folder", metavar="RUN|CHECKPOINT")


@click.group(cls=Commands)
def ckpt() -> None:
    """List, verify, show or compare checkpoints.

    RUN is the folder of a run or of its checkpoints, CHECKPOINT one of them (.../global_step_N); both may be addresses
    in an object store.
    """


@ckpt.command(name="list", epilog=examples("skyrl ckpt list runs/mine"))
@FOLDER
@json_option
def list_(folder: str, as_json: bool) -> None:
    """List checkpoints: step, size, ranks, and what is missing.

    All files have to exist with the right size.
    """
    store, steps = _open_store(folder)
    if as_json:
        listed = [_row(store, step) | {"problems": store.verify(step, "size")} for step in steps]
        print_result({"folder": store.folder, "checkpoints": listed})
        return
    click.echo(f"{store.folder}: {len(steps)} checkpoint{'s' if len(steps) != 1 else ''}")
    for step in steps:
        wrong = store.verify(step, "size")
        click.echo(f"  {step:>8}  {_line(store, step) if not wrong else wrong[0]}")


@ckpt.command(epilog=examples("skyrl ckpt verify runs/mine"))
@FOLDER
@json_option
def verify(folder: str, as_json: bool) -> None:
    """Compare every byte of every file with the manifest.

    The exit code is 1 if anything is missing or damaged.
    """
    store, steps = _open_store(folder)
    if not steps:
        raise ResumeError(f"{store.folder} contains no checkpoint")
    wrong = {step: store.verify(step) for step in steps}
    is_good = not any(wrong.values())
    if as_json:
        rows = [{"step": step, "problems": problems} for step, problems in wrong.items()]
        print_result({"folder": store.folder, "checkpoints": rows}, ok=is_good)
    else:
        for step, problems in wrong.items():
            click.echo(f"  {step:>8}  {'damaged' if problems else 'good'}")
            for line in problems:
                click.echo(f"            {line}")
    sys.exit(0 if is_good else 1)


@ckpt.command(epilog=examples("skyrl ckpt show runs/mine", "skyrl ckpt show checkpoints/global_step_20"))
@FOLDER
@json_option
def show(folder: str, as_json: bool) -> None:
    """Show the newest checkpoint, or the named one.

    Its files, state, metrics and versions are shown.
    """
    from skyrl.storage.disk import readable

    store, steps = _open_store(folder)
    if not steps:
        raise ResumeError(f"{store.folder} contains no checkpoint")
    checkpoint, manifest = store.load(steps[-1]), store.manifest(steps[-1])
    if as_json:
        about = {
            "folder": store.folder,
            "fingerprint": checkpoint.fingerprint,
            "versions": manifest.versions,
            "models": {
                model: {"tensors": len(tensors), "weights": _weights(tensors)}
                for model, tensors in checkpoint.models.items()
            },
            "files": [{"name": file.name, "size": file.size, "digest": file.digest} for file in manifest.files],
            "state": checkpoint.state,
            "metrics": manifest.metrics,
        }
        print_result(_row(store, checkpoint.step) | about)
        return
    click.echo(f"{store.folder}/global_step_{checkpoint.step}  {_line(store, checkpoint.step)}")
    click.echo(f"  fingerprint  {checkpoint.fingerprint[:16]}")
    click.echo("  versions     " + ", ".join(f"{name} {version}" for name, version in manifest.versions.items()))
    for model, tensors in checkpoint.models.items():
        click.echo(f"  {model:<12} {len(tensors)} tensors, {_weights(tensors):,} weights")
    for file in manifest.files:
        click.echo(f"    {file.name:<40} {readable(file.size):>10}  {file.digest}")
    click.echo("  state")
    for path, value in _flat(_abbreviate_tables(checkpoint.state)):
        click.echo(f"    {path} = {value if isinstance(value, _Count) else json.dumps(value, ensure_ascii=False)}")
    click.echo("  metrics")
    for name, number in sorted(manifest.metrics.items()):
        click.echo(f"    {name} = {number:g}")


@ckpt.command(epilog=examples("skyrl ckpt diff checkpoints/global_step_20 checkpoints/global_step_40"))
@click.argument("one")
@click.argument("other")
@json_option
def diff(one: str, other: str, as_json: bool) -> None:
    """Show how two checkpoints differ.

    Configuration and state are compared, and the tensors that differ most are named.
    """
    from skyrl.checkpoint.store import load_checkpoint
    from skyrl.tree.dump import short_json

    first, second = (load_checkpoint(_checkpoint_path(folder)) for folder in (one, other))
    compared = {"configuration": (first.config, second.config), "state": (first.state, second.state)}
    changes = {title: _changes(*pair) for title, pair in compared.items()}
    models = {
        model: _tensors_that_differ(first.models.get(model, {}), second.models.get(model, {}))
        for model in dict.fromkeys([*first.models, *second.models])
    }
    if as_json:
        print_result({**changes, "models": models})
        return
    for title, rows in changes.items():
        click.echo(f"{title}: {len(rows)} values differ")
        for row in rows:
            click.echo(f"  {row['path']}: {short_json(row['before'])} -> {short_json(row['after'])}")
    for model, rows in models.items():
        tensors = first.models.get(model, {}).keys() | second.models.get(model, {}).keys()
        click.echo(f"{model}: {len(rows)} of {len(tensors)} tensors differ")
        for row in rows[:MOST]:
            same_shape = row["before"] == row["after"]
            difference = f"differs by at most {row['most']:.3g}" if same_shape else f"{row['before']} -> {row['after']}"
            click.echo(f"  {row['name']}: {difference}")
        if len(rows) > MOST:
            click.echo(f"  and {len(rows) - MOST} more")


def _changes(before: object, after: object) -> list[dict[str, Any]]:
    """Path and both values of what differs in nested data."""
    old, new = dict(_flat(before)), dict(_flat(after))
    changed = [path for path in dict.fromkeys([*old, *new]) if old.get(path) != new.get(path)]
    return [{"path": path, "before": old.get(path), "after": new.get(path)} for path in changed]


def _tensors_that_differ(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Name, both shapes (`nothing` for an absent tensor) and largest difference of each, weights and largest first."""
    import torch

    rows: list[dict[str, Any]] = []
    for name in dict.fromkeys([*old, *new]):
        shapes = {"before": _shape(old, name), "after": _shape(new, name)}
        if shapes["before"] != shapes["after"]:
            rows.append({"name": name, **shapes, "most": float("inf")})
        elif not torch.equal(old[name], new[name]):
            rows.append({"name": name, **shapes, "most": (old[name].double() - new[name].double()).abs().max().item()})
    return sorted(rows, key=lambda row: (row["name"].startswith("model."), row["most"], row["name"]), reverse=True)


def _open_store(folder: str) -> tuple[CheckpointStore, list[int]]:
    """The store that `folder` refers to, and its steps. Raises `ResumeError`."""
    from skyrl.checkpoint.names import name_of, step_of
    from skyrl.checkpoint.store import CheckpointStore
    from skyrl.runs.stored_runs import checkpoints_of

    step = step_of(folder)
    if step is not None:
        store = CheckpointStore(_checkpoint_path(folder).rpartition("/")[0])
        try:
            files = store.storage.names(name_of(step))
        except OSError as error:
            raise ResumeError(f"{folder} cannot be read: {error}") from error
        if not files:
            raise ResumeError(f"there is no checkpoint folder {folder}")
        return store, [step]
    location = checkpoints_of(folder)
    store = CheckpointStore(location)
    steps = store.steps()
    if not steps and "://" not in location and not Path(location).is_dir():
        raise ResumeError(f"there is no folder {location}")
    return store, steps


def _checkpoint_path(folder: str) -> str:
    """The absolute name of one checkpoint. Raises `ResumeError` if it is not the name of one."""
    from skyrl.checkpoint.names import step_of

    if step_of(folder) is None:
        raise ResumeError(f"{folder} is not a checkpoint: give a folder .../global_step_N")
    return folder.rstrip("/") if "://" in folder else str(Path(folder).expanduser().absolute())


def _line(store: CheckpointStore, step: int) -> str:
    from skyrl.storage.disk import readable

    manifest = store.manifest(step)
    ranks = (f"{model} on {size} rank{'s' if size != 1 else ''}" for model, size in manifest.world_size.items())
    return f"{readable(manifest.size):>9}  {', '.join(ranks)}"


def _row(store: CheckpointStore, step: int) -> dict[str, Any]:
    manifest = store.manifest(step)
    return {"step": step, "size": manifest.size, "ranks": dict(manifest.world_size)}


def _weights(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() for name, tensor in tensors.items() if name.startswith("model."))


def _flat(data: object, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(data, Mapping) and data:
        for name, value in data.items():
            yield from _flat(value, f"{path}.{name}" if path else str(name))
    else:
        yield path, data


class _Count(str):
    """Placeholder for a table that is too long to print."""


def _abbreviate_tables(data: object, parts: int = 2) -> object:
    """The data with every table of more than `MOST` values, such as digests of data parts or what alarms have seen,
    replaced by their number; of the outer `parts` levels, only tables without tables in them.
    """
    if not isinstance(data, Mapping):
        return data
    values = sum(1 for _ in _flat(data))
    if values > MOST and (parts <= 0 or not any(isinstance(value, Mapping) for value in data.values())):
        return _Count(f"({values} values)")
    return {name: _abbreviate_tables(value, parts - 1) for name, value in data.items()}


def _shape(tensors: Mapping[str, Any], name: str) -> str:
    return str(tuple(tensors[name].shape)) if name in tensors else "nothing"
