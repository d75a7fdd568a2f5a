"""A run in its folder, as Python sees it: metrics, samples, the trained model, a report, and its continuation."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl.api.brief_errors import brief_errors
from skyrl.api.commands import evaluated, trained
from skyrl.api.display import relative_to_cwd, run_html
from skyrl.api.source import Source, source_of_folder
from skyrl.config.loading.kinds import kind_of
from skyrl.errors import ResumeError, UserError
from skyrl.installation import package_command
from skyrl.runs.run_folder import RunFolder
from skyrl.runs.stored_runs import stored_run
from skyrl.tracking.run_progress import RunProgress

if TYPE_CHECKING:
    import pandas as pd
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from skyrl.runs.stored_runs import Run as Tree


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
        source = self.source.with_assignments({**_resume_assignments(self.config), **overrides})
        return Run(trained(source), source)

    @brief_errors
    def evaluate(
        self, *, step: int | None = None, to: str | PathLike[str] | None = None, **overrides: object
    ) -> dict[str, Any]:
        """Evaluate the run on `data.val_data`: `skyrl.evaluate` of this run, with the same arguments and errors."""
        return evaluated(
            str(self.folder), self.source.with_assignments(overrides), step, None if to is None else Path(to)
        )

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
        return run_html(self.folder, self.status, self.metrics)


def _resume_assignments(run: Tree) -> dict[str, object]:
    """Assignments that make a run continue from its newest checkpoint, which must exist."""
    kind = kind_of(run)
    latest = "resume_from" if kind.trainer == "" else "resume_mode"
    return {kind.path(latest): "latest", kind.path("recover_mode"): "resume"}


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
