"""Checks of this machine before a run starts: packages, GPUs, keys, files, models, tasks. Imports nothing heavy.

`PREFLIGHT` has the checks of reinforcement learning, `SUPERVISED_PREFLIGHT` those of supervised runs; `skyrl run` and
`skyrl doctor` report their problems with those of the configuration. What needs the data and the tokenizer loaded is
checked later, in `skyrl.runs.inputs`.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from skyrl.config import SkyRLTrainConfig, SupervisedConfig
from skyrl.config.engines import backend_of
from skyrl.config.sizes import evaluates, on_ray, samples, sizes_of
from skyrl.config.trackers import TRACKERS
from skyrl.config.unimplemented import Unimplemented
from skyrl.envs import find_env
from skyrl.errors import Problem, TaskError
from skyrl.models.paths import check_model_path
from skyrl.planning.sizes import layout
from skyrl.tree.rules import Check

# One setting of any kind of run.

_FILES = (".parquet", ".jsonl", ".csv", ".json")


def missing_packages(wanted: Iterable[tuple[str, str, str]]) -> Iterator[Problem]:
    """Problems of packages that are not installed, given (the path that asks for it, the package, the extra)."""
    for field, package, extra in wanted:
        if importlib.util.find_spec(package) is None:
            message = f"needs the package {package}, which is not installed"
            yield Problem(path=field, message=message, hint=f"pip install 'skyrl[{extra}]'")


def missing_model(field: str, path: str | None) -> Iterator[Problem]:
    """A local folder holds a model; a hub name can only be tried."""
    why = no_path(path) or check_model_path(path) if path else None
    if why:
        yield Problem(path=field, message=why)


def missing_data(field: str, sources: Iterable[str]) -> Iterator[Problem]:
    """A source that names a file is there; a hub name can only be tried."""
    for source in sources:
        why = no_path(source)
        if not why and Path(source).suffix in _FILES and not Path(source).expanduser().is_file():
            why = f"there is no file {source}"
        if why:
            yield Problem(path=field, message=why)


def unusable_folder_name(field: str, path: str | None) -> Iterator[Problem]:
    """A folder to write to has a name, and one that this machine takes."""
    why = "is empty: name a folder" if path == "" else path and no_path(path)
    if why:
        yield Problem(path=field, message=why)


def missing_checkpoint(field: str, path: str, hint: str = "") -> Iterator[Problem]:
    """A checkpoint on a disk is there."""
    if "://" in path:
        return
    why = no_path(path) or (None if Path(path).expanduser().is_dir() else f"there is no folder {path}")
    if why:
        yield Problem(path=field, message=why, hint=hint)


def no_path(path: str) -> str | None:
    """Why the file system will not even look at the path, such as the home of a user who does not exist."""
    try:
        Path(path).expanduser().exists()
    except (OSError, RuntimeError, ValueError) as error:
        return f"{path[:80]!r} is not a path here: {error}"
    return None


# Reinforcement learning.


def packages_are_installed(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Packages that the chosen strategy, engine and executor import are installed."""
    yield from missing_packages(_packages(run))


def there_are_gpus_for_it(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """A run that starts its own Ray, or none, finds its GPUs on this machine."""
    placement = run.trainer.placement
    if run.trainer.device != "cuda" or placement.ray_address is not None:
        return
    try:
        wanted = layout(sizes_of(run)).gpus if on_ray(run) else 1
    except ValueError:  # another check reports sizes that do not go together
        return
    there = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    if there < wanted:
        yield Problem(
            path="trainer.placement.ray_address" if on_ray(run) else "trainer.device",
            message=f"this run takes {wanted} GPUs, and this machine has {there}",
            hint="join a cluster by trainer.placement.ray_address, or take fewer (see `skyrl plan`)",
        )


def keys_are_there(environ: Mapping[str, str]) -> Check[SkyRLTrainConfig]:
    """The check that services which want a key find one among these variables."""

    def services_have_their_keys(run: SkyRLTrainConfig) -> Iterator[Problem]:
        yield from the_judge_has_its_key(run)
        yield from trackers_have_their_keys(run)

    def the_judge_has_its_key(run: SkyRLTrainConfig) -> Iterator[Problem]:
        """OpenAI answers no request without a key; another service may."""
        path = "environment.skyrl_gym.llm_as_a_judge.base_url"
        judges = run.environment.env_class == "llm_as_a_judge"
        if judges and run.environment.skyrl_gym.llm_as_a_judge.base_url is None and not environ.get("OPENAI_API_KEY"):
            hint = "set the variable OPENAI_API_KEY, or name another service that speaks OpenAI's protocol"
            yield Problem(path=path, message="OpenAI, the judge's service, wants a key, and there is none", hint=hint)

    def trackers_have_their_keys(run: SkyRLTrainConfig) -> Iterator[Problem]:
        """W&B takes its key from the environment, or from what `wandb login` left in the home folder."""
        logger = run.trainer.logger
        names = (logger,) if isinstance(logger, str) else logger
        logged_in = (Path(environ.get("HOME", "/")) / ".netrc").is_file()
        offline = environ.get("WANDB_MODE") in ("offline", "disabled")
        if "wandb" in names and not environ.get("WANDB_API_KEY") and not logged_in and not offline:
            hint = "set the variable WANDB_API_KEY, run `wandb login`, or set trainer.logger = console"
            yield Problem(path="trainer.logger", message="wandb wants a key, and there is none", hint=hint)

    return services_have_their_keys


def this_version_has_the_trackers(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """What metrics are to go to is implemented. `skyrl config check` believes the names: a later version may run it."""
    yield from Unimplemented("trainer.logger", "trackers other than the console", tuple(TRACKERS)).check(run)


def _packages(run: SkyRLTrainConfig) -> Iterator[tuple[str, str, str]]:
    """The path that asks for it, the package, and the extra that brings it."""
    yield "trainer.policy.model.path", "torch", "train"
    yield "trainer.policy.model.path", "transformers", "train"
    if on_ray(run):
        yield "trainer.placement.executor", "ray", "ray"
    backend = backend_of(run.generator.inference_engine)
    if backend.package and samples(run):
        yield "generator.inference_engine.backend", backend.package, backend.extra
    logger = run.trainer.logger
    for name in (logger,) if isinstance(logger, str) else logger:
        if name in TRACKERS and TRACKERS[name].package:
            yield "trainer.logger", TRACKERS[name].package, TRACKERS[name].extra
    if run.trainer.strategy == "deepspeed":
        yield "trainer.strategy", "deepspeed", "deepspeed"


def models_are_where_they_are_said_to_be(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """A local model folder holds a model; a hub name can only be tried."""
    paths = {"trainer.policy.model.path": run.trainer.policy.model.path}
    if run.trainer.algorithm.use_kl_loss and run.trainer.ref.model.path != run.trainer.policy.model.path:
        paths["trainer.ref.model.path"] = run.trainer.ref.model.path
    for field, path in paths.items():
        yield from missing_model(field, path)


def data_files_exist(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """A source that names a file is there; a hub name can only be tried. Recorded samples need no prompts."""
    if not samples(run):
        return
    yield from missing_data("data.train_data", run.data.train_data)
    if evaluates(run):
        yield from missing_data("data.val_data", run.data.val_data)


def the_task_can_be_imported(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """The environment or reward function of the configuration exists, where it is used."""
    try:
        if run.environment.env_class is not None and samples(run):
            find_env(run.environment.env_class)
    except TaskError as error:
        yield Problem(path="environment.env_class", message=str(error))


def the_checkpoint_exists(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """A checkpoint that is named is there."""
    if path := run.trainer.resume_path:
        yield from missing_checkpoint("trainer.resume_path", path)


def folders_have_names(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Output of a run goes into folders that the user named."""
    trainer = run.trainer
    yield from unusable_folder_name("trainer.run_path", trainer.run_path)
    yield from unusable_folder_name("trainer.ckpt_path", trainer.ckpt_path)
    yield from unusable_folder_name("trainer.export_path", trainer.export_path)


def the_recording_exists(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """A recording that is to be trained on is there."""
    path = run.trainer.rollouts_from
    if path is None:
        return
    why = no_path(path)
    if not why and not (Path(path).expanduser() / "recording" / "about.json").is_file():
        why = f"there is no recording in {path or 'an empty path'}: name the folder of a run with trainer.recording on"
    if why:
        yield Problem(path="trainer.rollouts_from", message=why)


PREFLIGHT: tuple[Check[SkyRLTrainConfig], ...] = (
    packages_are_installed,
    there_are_gpus_for_it,
    this_version_has_the_trackers,
    keys_are_there(os.environ),
    models_are_where_they_are_said_to_be,
    data_files_exist,
    the_task_can_be_imported,
    the_checkpoint_exists,
    folders_have_names,
    the_recording_exists,
)


# Supervised runs.


def packages_are_there(run: SupervisedConfig) -> Iterator[Problem]:
    """Packages that the chosen strategy and executor import are installed."""
    wanted = [("model.path", "torch", "train"), ("model.path", "transformers", "train")]
    wanted += [("placement.executor", "ray", "ray")] if run.placement.executor == "ray" else []
    wanted += [("strategy", "deepspeed", "deepspeed")] if run.strategy == "deepspeed" else []
    yield from missing_packages(wanted)


def the_model_is_there(run: SupervisedConfig) -> Iterator[Problem]:
    """A local folder holds a model; a hub name can only be tried."""
    yield from missing_model("model.path", run.model.path)


def the_rows_are_there(run: SupervisedConfig) -> Iterator[Problem]:
    """A source that names a file is there; a hub name can only be tried."""
    yield from missing_data("train_datasets", run.train_datasets)
    yield from missing_data("eval_datasets", run.eval_datasets)


def _written(run: SupervisedConfig) -> Iterator[tuple[str, str | None]]:
    for field in ("run_path", "ckpt_path", "export_path", "tokenized_path"):
        yield field, getattr(run, field)


def the_template_is_there(run: SupervisedConfig) -> Iterator[Problem]:
    """A file that replaces the chat template can be read."""
    template = run.chat_template
    if template.source == "file" and template.name_or_path and not Path(template.name_or_path).expanduser().is_file():
        yield Problem(path="chat_template.name_or_path", message=f"there is no file {template.name_or_path}")


def the_folders_have_names(run: SupervisedConfig) -> Iterator[Problem]:
    """Output of a run goes into folders that can be made; a named checkpoint exists."""
    for field, path in _written(run):
        yield from unusable_folder_name(field, path)
    if run.resume_from not in ("", "latest"):
        yield from missing_checkpoint("resume_from", run.resume_from, "latest, empty, or a checkpoint")


SUPERVISED_PREFLIGHT: tuple[Check[Any], ...] = (
    packages_are_there,
    the_model_is_there,
    the_rows_are_there,
    the_template_is_there,
    the_folders_have_names,
)
