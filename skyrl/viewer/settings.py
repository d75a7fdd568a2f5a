"""The configurations of runs for a report: values with their origins, and differences between runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from skyrl.errors import UserError
from skyrl.storage.json_files import parsed
from skyrl.tree.files import stored_text

FILE = "config.json"


@frozen(kw_only=True)
class FieldRow:
    """One field of the configuration in every run."""

    path: str
    values: tuple[str, ...]
    """The value in each run, as JSON."""

    origins: tuple[str, ...]
    """For each run `default`, `derived`, or the place where the value was written, such as `run.toml:14`."""

    @property
    def differs(self) -> bool:
        """Whether the runs have different values."""
        return len(set(self.values)) > 1

    @property
    def is_place(self) -> bool:
        """Whether the field names the run or says where its files lie, which no two runs share."""
        name = self.path.rpartition(".")[2]
        return name in ("run_name", "run_path", "ckpt_path", "export_path", "log_path")

    @property
    def is_default(self) -> bool:
        """Whether every run uses the default."""
        return set(self.origins) == {"default"}


def settings(folders: Sequence[Path]) -> list[FieldRow]:
    """All fields of the runs in these folders, in the order of the tree. Raises `UserError` if a folder has no
    configuration.
    """
    stored = [_read_stored(folder) for folder in folders]
    leaves = [dict(_leaves("", item["config"])) for item in stored]
    derived = [set(_texts(entry.get("derived"))) for entry in stored]
    locations = [_table(element.get("places")) for element in stored]
    defaults = [_defaults(str(item["config"].get("kind", "rl"))) for item in stored]
    paths = dict.fromkeys(path for own in leaves for path in own)
    return [
        FieldRow(
            path=path,
            values=tuple(own.get(path, "") for own in leaves),
            origins=tuple(
                _origin(path, own, of_rules, default, written)
                for own, of_rules, default, written in zip(leaves, derived, defaults, locations, strict=True)
            ),
        )
        for path in paths
    ]


def _origin(
    path: str, own: Mapping[str, str], derived: set[str], default: Mapping[str, str], locations: Mapping[str, str]
) -> str:
    if any(path == rule or path.startswith(f"{rule}.") for rule in derived):
        return "derived"
    if path not in own:
        return "absent"
    around = (location for at, location in locations.items() if path == at or path.startswith(f"{at}."))
    return next(around, "default" if own[path] == default.get(path) else "written")


def _texts(paths: object) -> list[str]:
    return [path for path in paths if isinstance(path, str)] if isinstance(paths, list) else []


def _table(stored: object) -> dict[str, str]:
    """Places of values by path, longest path first; earlier versions stored none."""
    result = stored if isinstance(stored, dict) else {}
    return {path: str(result[path]) for path in sorted(result, key=len, reverse=True)}


def _read_stored(folder: Path) -> Mapping[str, Any]:
    try:
        stored = parsed(stored_text(folder / FILE))
        if isinstance(stored, dict) and isinstance(stored.get("config"), dict):
            return stored
    except OSError:
        raise UserError(f"{folder} is not the folder of a run: it contains no {FILE}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{folder / FILE} cannot be read: {error}") from error
    raise UserError(f"{folder / FILE} contains no configuration")


def _defaults(kind: str) -> Mapping[str, str]:
    """The default values of this version; none for an unknown kind of run."""
    import cattrs

    from skyrl.config.loading.kinds import KINDS, root_of

    return dict(_leaves("", cattrs.unstructure(root_of(kind)()))) if kind in KINDS else {}


def _leaves(path: str, value: Any) -> list[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        return [leaf for name, item in value.items() for leaf in _leaves(f"{path}.{name}" if path else name, item)]
    return [(path, json.dumps(value, ensure_ascii=False, default=str))]
