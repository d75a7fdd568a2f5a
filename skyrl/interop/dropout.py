"""Converts switches of a model's own dropout, which most current models do not have."""

from __future__ import annotations

import json
from pathlib import Path

from skyrl.interop.translation import Dependent, Translation, Values, redundant
from skyrl.tree.files import stored_text

_NONE = "no effect: the model's configuration sets no dropout"
_UNSEEN = "acts only if the model's configuration sets dropout, as few do: then set {path}"


def dropout(path: str, model: str) -> Dependent:
    """Entry of a switch that turns dropout off. If it is false, our field at `path` becomes true for a model whose own
    configuration has dropout, since learners refuse it for any other. `model` is the setting with the model's folder.
    """

    def become(key: str, value: object, values: Values) -> Translation:
        if value is not False:
            return redundant("dropout is off by default")
        has_dropout = _model_dropout(values.get(model))
        if has_dropout is None:
            return redundant(_UNSEEN.format(path=path))
        return Translation(writes={path: True}) if has_dropout else redundant(_NONE)

    return become


def _model_dropout(model: object) -> bool | None:
    """Whether the configuration in the model's folder sets dropout; None if there is no such file."""
    try:
        settings = json.loads(stored_text(Path(str(model)).expanduser() / "config.json"))
        shares = [share for name, share in settings.items() if "drop" in name]
    except (OSError, ValueError, AttributeError):
        return None
    return any(not isinstance(share, bool) and isinstance(share, int | float) and share > 0 for share in shares)
