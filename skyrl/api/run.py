"""`skyrl.train` trains a model in this process, as `skyrl run` does; `Run` is a run in its folder, as Python sees it:
metrics, samples, the trained model, a report, and its continuation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from skyrl.api.source import Config, Source, brief_errors, evaluated, source_of, source_of_folder, trained
from skyrl.config.loading.kinds import kind_of
from skyrl.errors import ResumeError, UserError
from skyrl.installation import package_command
from skyrl.runs.run_folder import RunFolder
from skyrl.runs.stored_runs import stored_run
from skyrl.tracking.run_progress import RunProgress
from skyrl.training.callbacks import Callback

if TYPE_CHECKING:
    import pandas as pd
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from skyrl.runs.stored_runs import Run as Tree

Points = Sequence[tuple[float, float]]

_CURVES = (
    ("reward/avg_raw_reward", "reward", "#4c78a8"),
    ("eval/all/avg_score", "evaluation", "#e45756"),
    ("train/loss", "loss", "#4c78a8"),
    ("eval/all/loss", "evaluation loss", "#e45756"),
)
"""Metrics that are drawn where a run has them, with label and colour."""

_WIDTH, _HEIGHT = 360, 110


class Run:
    """A run in its folder, finished or not, from `skyrl.train` or `skyrl.load`. Files are read when asked for."""

    def __init__(self, folder: Path, source: Source) -> None:
        """`source` is what the run was made from, and what it continues with."""
        self.folder = folder
        """The run's own folder, absolute."""

        self.source = source
        self._files = RunFolder(folder)

    @property
    def config(self) -> Tree:
        """The resolved configuration, as the folder has it."""
        return stored_run(self.folder)

    @property
    def status(self) -> str:
        """running, finished, stopped, failed, or gone: its process ended without a word."""
        progress = RunProgress(self.folder)
        progress.look()
        return progress.now.state

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The metrics of every step, as a dictionary for each; `step` is its number, 0 for what precedes training."""
        return list(self._files.metrics.read())

    def to_pandas(self) -> pd.DataFrame:
        """The metrics as a table: a row for each step, which is the index, and a column for each metric.

        Raises:
            UserError: The package pandas is not installed.
        """
        try:
            import pandas as pd
        except ModuleNotFoundError:
            raise UserError(
                f"to_pandas needs the package pandas: {package_command('pandas')}; metrics are a list without it"
            ) from None
        records = self.metrics
        return pd.DataFrame(records).set_index("step") if records else pd.DataFrame()

    def samples(self, step: int | None = None) -> list[dict[str, Any]]:
        """Sampled answers with their rewards: `step`, `prompt`, `response`, `reward`, and more.

        Args:
            step: The step that sampled them; None for all steps.

        Returns:
            A dictionary for each sample that was kept; empty for a run that samples nothing.
        """
        records = self._files.samples.lines.read()
        return [record for record in records if step is None or record.get("step") == step]

    @property
    def model_folder(self) -> Path:
        """Folder of the trained model in Hugging Face format.

        Raises:
            ResumeError: The run has no trained model yet.
        """
        if not self._files.model.is_dir():
            raise ResumeError(f"{self.folder} has no trained model: the run is {self.status}; resume() continues it")
        return self._files.model

    def model(self) -> PreTrainedModel:
        """The trained model, loaded by transformers: a causal language model or, of a reward model, a classifier with
        one label. Raises as `model_folder` does.
        """
        from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

        scores = kind_of(self.config).trained.scores
        loader = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
        model: PreTrainedModel = loader.from_pretrained(self.model_folder)
        return model

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the trained model. Raises as `model_folder` does."""
        from transformers import AutoTokenizer

        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(self.model_folder)
        return tokenizer

    @brief_errors
    def resume(self, **overrides: object) -> Run:
        """Continue the run from its newest checkpoint, and return it.

        Code that the run was given in this program is used again. A run of `load` follows no code that only its folder
        names: give it again, as in `resume(environment__env_class=my_reward)`.

        Args:
            overrides: Values of fields, as in `train`: `trainer__max_training_steps=200` makes it longer.

        Raises:
            ResumeError: There is no checkpoint, or a change would make it another run.
            UserError, RunError, Stopped: As in `train`.
        """
        kind = kind_of(self.config)
        latest = kind.path("resume_from" if kind.trainer == "" else "resume_mode")
        newest = {latest: "latest", kind.path("recover_mode"): "resume"}  # which must exist
        source = self.source.with_assignments({**newest, **overrides})
        return Run(trained(source), source)

    @brief_errors
    def evaluate(
        self, *, step: int | None = None, to: str | PathLike[str] | None = None, **overrides: object
    ) -> dict[str, Any]:
        """Evaluate the run on `data.val_data`: `skyrl.evaluate` of this run, with the same arguments and errors."""
        return evaluated(str(self.folder), self.source.with_assignments(overrides), step, to)

    @brief_errors
    def report(self, to: str | PathLike[str] | None = None, *, beside: Sequence[Run] = (), samples: int = 60) -> Path:
        """Write what `skyrl report` writes into one HTML file that needs no network: summary, curves, events, layout,
        configuration and samples.

        Args:
            to: The file, which is replaced if it exists; by default `report.html` in the run's folder.
            beside: Other runs that are drawn into the same charts.
            samples: Largest number of samples of each run.

        Returns:
            The path of the file.

        Raises:
            UserError: The run has no metrics yet, or a package of the extra `report` is missing.
            OSError: The file cannot be written.
        """
        from skyrl.installation import install_command
        from skyrl.storage.atomic import write_file
        from skyrl.tools.plan_picture import pictures_in

        try:
            from skyrl.viewer.report import report
        except ModuleNotFoundError as error:
            raise UserError(f"report needs {error.name}: {install_command('report')}") from None

        file = self.folder / "report.html" if to is None else Path(to)
        folders = [self.folder, *(run.folder for run in beside)]
        layouts, gpus = pictures_in(folders)
        write_file(file, report(folders, samples=samples, layouts=layouts, gpus=gpus))
        return file

    def __repr__(self) -> str:
        steps = self.metrics
        return f"<Run {relative_to_cwd(self.folder)}: {self.status}, step {steps[-1]['step'] if steps else 0}>"

    def _repr_html_(self) -> str:
        """Folder, status, curve and score before and after, as notebooks show them."""
        return _html(self.folder, self.status, self.metrics)


@brief_errors
def train(config: Config, *, callbacks: Sequence[Callback] = (), **overrides: object) -> Run:
    """Train a model as configured, to the end, and return the run.

    An unfinished run in the same folder is continued from its last checkpoint; a finished one is returned as it is.
    Works under a running event loop, such as a notebook's.

    Args:
        config: A file (TOML, YAML or JSON), the folder of a run, or `preset:NAME`; a list of these, of which later ones
            win; a mapping of dotted paths to values; or a tree, such as `SkyRLTrainConfig` or the result of `compose`.
        callbacks: Objects that hear the events of the loop, besides those that the configuration names.
        overrides: Values of fields, with two underscores for each dot: `trainer__max_training_steps=20`. Fields that
            name code also take a function or class: `environment__env_class=my_reward`.

    Returns:
        The run, whose folder holds metrics, samples, checkpoints and the trained model.

    Raises:
        UserError: Configuration, data, model or folder cannot be used; nothing was started. `ConfigError` lists every
            problem of the configuration.
        RunError: The run cannot continue; what was saved stays.
        Stopped: A signal or the deadline ended the run early.

    Example:
        run = skyrl.train("run.toml", trainer__run_path="runs/short", trainer__max_training_steps=20)
    """
    source = attrs.evolve(source_of(config, overrides), callbacks=tuple(callbacks))
    return Run(trained(source), source)


@brief_errors
def load(folder: str | PathLike[str]) -> Run:
    """The run in a folder, finished or not.

    Args:
        folder: The run's folder, which `trainer.run_path` named.

    Raises:
        UserError: The folder is not that of a run. `ConfigError`: this version cannot read its configuration.

    Example:
        skyrl.load("runs/mine").to_pandas()["reward/avg_raw_reward"].plot()
    """
    path = Path(folder).expanduser().absolute()
    return Run(path, source_of_folder(path))


def _html(folder: Path, status: str, records: Sequence[Mapping[str, Any]]) -> str:
    """A table with the facts of a run, and its curve; `records` are its metrics."""
    last = records[-1]["step"] if records else 0
    curves = [(label, colour, points_of(records, name)) for name, label, colour in _CURVES]
    curves = [curve for curve in curves if curve[2]]
    rows = {"folder": relative_to_cwd(folder), "status": f"{status}, step {last}"}
    for label, _, points in curves:
        (first, before), (end, after) = points[0], points[-1]
        rows[label] = f"{after:.3f} at step {end:g}" if first == end else f"{before:.3f} → {after:.3f}"
    cells = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in rows.items())
    return f"<table>{cells}</table>{_svg(curves)}"


def relative_to_cwd(folder: Path) -> str:
    """The path, relative to the working directory if it is below that."""
    return str(folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder)


def points_of(records: Sequence[Mapping[str, Any]], name: str) -> Points:
    """(step, value) of a metric, where it was recorded."""
    return [(record["step"], record[name]) for record in records if isinstance(record.get(name), int | float)]


def _svg(curves: Sequence[tuple[str, str, Points]]) -> str:
    """The curves in one picture, with a common scale; empty if none has two points."""
    points = [point for _, _, line in curves for point in line]
    if all(len(line) < 2 for _, _, line in curves):
        return ""
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)
    lines = []
    for _, colour, line in curves:
        coordinates = " ".join(
            f"{_WIDTH * (x - left) / (right - left or 1):.1f},{_HEIGHT - _HEIGHT * (y - low) / (high - low or 1):.1f}"
            for x, y in line
        )
        lines.append(f'<polyline points="{coordinates}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
    named = ", ".join(f'<span style="color:{colour}">{escape(label)}</span>' for label, colour, _ in curves)
    return (
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" viewBox="-4 -4 {_WIDTH + 8} {_HEIGHT + 8}" role="img">'
        f"{''.join(lines)}</svg><div>{named}: {low:.3g} to {high:.3g}, steps {left:g} to {right:g}</div>"
    )
