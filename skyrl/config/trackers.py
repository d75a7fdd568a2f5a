"""Trackers that this version has, by the name that `trainer.logger` has for them."""

from __future__ import annotations

from collections.abc import Mapping

import attrs


@attrs.frozen(kw_only=True)
class TrackerFacts:
    """Facts about a tracker."""

    made_by: str
    """Import path of its class, which has a constructor `of_run(run: TrackedRun)`. Nothing is imported before a run
    that names it."""

    package: str = ""
    """Package that the tracker imports and the `train` extra does not bring; `extra` is the extra that does."""

    extra: str = ""


TRACKERS: Mapping[str, TrackerFacts] = {
    "console": TrackerFacts(made_by="skyrl.tracking.console:Console"),
}
"""The others that `trainer.logger` can name are refused as not implemented."""
