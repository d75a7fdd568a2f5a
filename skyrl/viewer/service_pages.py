"""The pages of a training service in `skyrl view`: its models and clients, the curves of models, and samples."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skyrl.tracking.service_status import finished_of, model_folders, service_status, silence, work_of
from skyrl.tracking.token_file import FOLDER, TokenFiles
from skyrl.viewer.pages import Pages
from skyrl.viewer.run_card import RunCard, cost, scores
from skyrl.viewer.run_metrics import RunMetrics
from skyrl.viewer.sample_index import SampleIndex
from skyrl.viewer.server import RunFollower

MOST_CURVES = 8
"""Number of models whose curves share a chart, as many as there are colours: those that stepped last."""

MOST_ENDED = 50
"""Number of unloaded models that the page lists, the newest ones."""


class ServiceMetrics(RunMetrics):
    """The series of all models of a service, each by the name of its folder, the one that stepped last at the end."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder
        self.models: dict[str, RunMetrics] = {}

    def look(self) -> int:
        """Read more lines of each model; see `RunMetrics.look`."""
        new = 0
        with self.lock:
            for folder in model_folders(self._folder):
                model = self.models.setdefault(folder.name, RunMetrics(folder))
                if lines := model.look():
                    self.models[folder.name] = self.models.pop(folder.name)
                    new += lines
            self.lines += new
        return new


class ServiceFollower(RunFollower):
    """Keeps the index and the metrics of a service up to date."""

    def state_now(self) -> str:
        """Present and finished work of the service."""
        status = status_in(self.folder)
        return "; ".join(filter(None, (silence(status), work_of(status), f"finished: {finished_of(status)}")))


class ServicePages(Pages):
    """The pages of one service."""

    about = "service and curves"

    def __init__(self, service: Path, index: SampleIndex) -> None:
        super().__init__(service, index, TokenFiles(service / FOLDER))
        self.metrics: ServiceMetrics = ServiceMetrics(service)

    def run(self) -> str:
        """The page of the service: its models, its clients and the curves of those that stepped last."""
        status = status_in(self._run)
        with self.metrics.lock:
            present = {_name(model): model for model in status["models"]}
            runs = {name: item.series for name, item in list(self.metrics.models.items())[-MOST_CURVES:]}
            ended = [(name, model) for name, model in self.metrics.models.items() if name not in present]
            return self._rendered(
                "service.html",
                status=status,
                silent=silence(status),
                work=work_of(status),
                finished=finished_of(status),
                models=present,
                ended=ended[: -MOST_ENDED - 1 : -1],
                **self._curves(runs),
            )

    def model(self, name: str) -> str | None:
        """The page of a model, whose folder has this name; None if there is none."""
        status = status_in(self._run)
        with self.metrics.lock:
            metrics = self.metrics.models.get(name)
            if metrics is None:
                return None
            model = next((item for item in status["models"] if _name(item) == name), None)
            return self._run_page(_card(name, model, status, metrics), {name: metrics.series})

    def _token_rows(self, record: Mapping[str, Any]) -> tuple[list[Any], str]:
        return [], ""  # a service keeps no numbers of single tokens


def status_in(folder: Path) -> Mapping[str, Any]:
    """The status in the folder of a service; that of one without work if it is being replaced or damaged."""
    return service_status(folder) or _EMPTY


_EMPTY: Mapping[str, Any] = {
    "time": 0.0,
    "base": "",
    "models": [],
    "clients": [],
    "finished": {},
    **dict.fromkeys(("sessions", "samplers", "samples_running", "samples_waiting", "requests_waiting", "tokens"), 0),
}


def _name(model: Mapping[str, Any]) -> str:
    """Name of a model's folder."""
    return str(model["id"]).replace(":", "-")


def _card(name: str, model: Mapping[str, Any] | None, status: Mapping[str, Any], metrics: RunMetrics) -> RunCard:
    """The card of a model, or of one that was unloaded."""
    trained = [("base", str(status["base"]))]
    if model is not None:
        description = "all weights" if model["rank"] is None else f"an adapter of rank {model['rank']}"
        trained += [
            ("client", model["client"]),
            ("trained", description),
            ("requests that wait", str(model["waiting"])),
        ]
    at = f"step {metrics.last_step:,}"
    return RunCard(
        name=name,
        state=f"loaded, {at}" if model else f"unloaded, {at}",
        tone="live" if model and not silence(status) else "plain",
        trained=tuple(trained),
        scores=tuple(scores(metrics)),
        cost=tuple(cost(metrics, None, "")),
        troubles=(),
        notes=(),
    )
