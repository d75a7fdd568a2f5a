"""Comparison of the inputs that a resumed run reads again: models, validation rows, databases, templates.

A checkpoint has a digest of each, made when the session had read them. A session that finds another one is refused: it
would continue as another run without a word. Training rows are compared by `skyrl.data.cursor`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import chain
from pathlib import Path

from skyrl.checkpoint.store import Checkpoint
from skyrl.config import SkyRLTrainConfig
from skyrl.config.settings.environment import MCP, weighted_names
from skyrl.config.settings.models import ModelConfig
from skyrl.data.prompts import PromptDataset
from skyrl.envs.mcp.environment import TABLE as MCP_TABLE
from skyrl.envs.mcp.environment import McpTask
from skyrl.envs.registry import find_env
from skyrl.envs.text2sql import database
from skyrl.errors import ResumeError, TaskError
from skyrl.hub import cached_folder
from skyrl.models.files.paths import INDEX, local_folder, weight_files
from skyrl.rollout.harbor import TASK as HARBOR_TASK
from skyrl.runs.run_tree import AnyRun
from skyrl.storage.disk import digest_of

Digests = Mapping[str, str]
"""A digest of each file or set of rows, keyed by the field that names it and the name of the file:
`trainer.ref.model.path: model.safetensors`. The digest of a missing file is empty."""

STATE = "read_again"
"""Key of the digests in a checkpoint's state."""

CONFIGURATION = ("config.json", "generation_config.json")
"""Files of every model whose settings are used."""

TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "tekken.json", "chat_template.jinja",
    "chat_template.json",
)  # fmt: skip
"""Files of tokenizers and their chat templates."""

BUDGET = 1 << 30
"""Number of bytes that are read of all files of a call together."""

BLOCK = 1 << 20
"""Number of bytes of a block, in a file that is not read whole."""

_ADAPTER = ("adapter_config.json", "adapter_model.safetensors")


def model_digests(field: str, model: ModelConfig, *, weights: bool) -> dict[str, str]:
    """Digests of a model's configuration and, with `weights`, of its weights and of the adapter that is merged into
    them. `field` is the dotted path of the model's name or folder.
    """
    path = str(model.path)
    result = model_file_digests(field, path, CONFIGURATION)
    if weights and not model.init_from_scratch:
        result |= model_file_digests(field, path, (INDEX, *_weights(path)))
    return result


def adapter_digests(field: str, model: ModelConfig) -> dict[str, str]:
    """Digests of the stored adapter of a model that does not learn; empty if it has none. `field` names its folder."""
    path = model.lora.path
    return {} if path is None else folder_digests(field, Path(path).expanduser(), _ADAPTER)


def model_file_digests(field: str, path: str, names: Iterable[str]) -> dict[str, str]:
    """Digests of files of a model's folder. Of a name on the hub, only files that this machine has are known."""
    folder = local_folder(path)
    if folder is not None:
        return folder_digests(field, folder, names)
    cached = cached_folder(path)
    known = {} if cached is None else folder_digests(field, cached, names)
    return {name: digest for name, digest in known.items() if digest}


def folder_digests(field: str, folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Digests of files of a folder, given their names."""
    files = {folder / name: f"{field}: {name}" for name in names}
    result = file_digests(files)
    return {name: result.get(file, "") for file, name in files.items()}


def combined_digest(key: str, files: Iterable[Path]) -> dict[str, str]:
    """One digest of the content of many files, in the order of their paths; empty without files."""
    result = file_digests(sorted(files))
    return {key: digest_of(digest.encode() for digest in result.values())} if result else {}


def file_digests(files: Iterable[Path]) -> dict[Path, str]:
    """xxh3-128 of each file that can be read: of its size, and of its content up to an equal share of `BUDGET`.

    A larger file is read in evenly spaced blocks, its first and its last among them. So another file of the same size
    is found if any of these blocks differs, as all of them do when a model was trained.
    """
    statuses = {file: file.stat() for file in files if file.is_file()}
    share = max(BLOCK, BUDGET // max(1, len(statuses)))
    digests = {}
    for file, status in statuses.items():
        try:
            digests[file] = _digest(file, status.st_size, share, (status.st_mtime_ns, status.st_ino))
        except OSError:  # whoever reads it for its content says why
            continue
    return digests


@cache
def _digest(file: Path, size: int, share: int, version: tuple[int, int]) -> str:
    """`version` is the file's time of change and its inode: unchanged files are read once per process."""
    return digest_of(chain([size.to_bytes(8, "little")], _blocks(file, size, share)))


def _blocks(file: Path, size: int, share: int) -> Iterator[bytes]:
    count = -(-min(size, share) // BLOCK)
    with file.open("rb", buffering=0) as opened:
        for number in range(count):
            if size > share:
                opened.seek(number * (size - BLOCK) // (count - 1) if count > 1 else 0)
            yield opened.read(BLOCK)


def judged_with(run: SkyRLTrainConfig, datasets: Sequence[PromptDataset]) -> dict[str, str]:
    """Digests of what the environments of these prompts read: tools of MCP servers, a reward model, databases, folders
    of Harbor tasks.
    """
    digests, gym = dict[str, str](), run.environment.skyrl_gym
    columns = {name for dataset in datasets for names in dataset.facts.columns.values() for name in names}
    tasks = {name for dataset in datasets for task in dataset.facts.columns for _, name in weighted_names(task)}
    if MCP in tasks:
        task = find_env(MCP, gym)
        assert isinstance(task, McpTask), "the environment mcp is made by one"
        digests |= {f"{MCP_TABLE}.servers: tools": task.digest()}
        tasks.add(str(gym.mcp.reward))
    if "reward_model" in tasks and gym.reward_model.url is None and gym.reward_model.path is not None:
        field, path = "environment.skyrl_gym.reward_model.path", gym.reward_model.path
        digests |= model_file_digests(field, path, (*CONFIGURATION, *TOKENIZER, INDEX, *_weights(path)))
    names = _values(datasets, "db_id") if "text2sql" in tasks else ()
    digests |= combined_digest("environment.skyrl_gym.text2sql.db_path", _databases(Path(gym.text2sql.db_path), names))
    folders = map(str, _values(datasets, HARBOR_TASK) - {None} if HARBOR_TASK in columns else ())
    tasks_files = (file for folder in folders for file in files_below(Path(folder)))
    return digests | combined_digest("the folders of Harbor tasks", tasks_files)


def _values(datasets: Sequence[PromptDataset], column: str) -> set[object]:
    """The values of a column of all prompts, None for those without it."""
    return {prompt.extras.get(column) for dataset in datasets for prompt in dataset.prompts}


def files_below(folder: Path) -> Iterator[Path]:
    """All files of a folder and of those inside."""
    return (file for file in folder.rglob("*") if file.is_file())


def refuse_changed_inputs(checkpoint: Checkpoint, now: Digests, run: AnyRun) -> None:
    """Raise `ResumeError` with what differs from what the run of the checkpoint read. What only one of them has read,
    such as validation rows before evaluation was turned on, is not compared.
    """
    if changed := changed_inputs(checkpoint, now):
        raise ResumeError(
            f"what this run reads again is not what it was when the checkpoint of step {checkpoint.step} was "
            f"saved:\n{changed}\n"
            f"Restore it, or start a new run with another {run.trainer.path_of('run_path')}"
        )


def changed_inputs(checkpoint: Checkpoint, now: Digests) -> str:
    """A line for each input that both have read and that differs; empty if none does."""
    before = _stored_digests(checkpoint)
    changed = [name for name, digest in now.items() if before.get(name, digest) != digest]
    return "\n".join(f"  {name}{_change_text(before[name], now[name])}" for name in changed)


def carried_on(checkpoint: Checkpoint | None, now: Digests) -> dict[str, str]:
    """The digests of this session, and those of earlier ones for what it has not read."""
    return {**(_stored_digests(checkpoint) if checkpoint else {}), **now}


def _stored_digests(checkpoint: Checkpoint) -> Digests:
    """The digests in a checkpoint; empty for one of an earlier version."""
    result = checkpoint.state.get(STATE, {})
    return {str(name): str(digest) for name, digest in result.items()} if isinstance(result, Mapping) else {}


def _change_text(before: str, now: str) -> str:
    if before and now:
        return " has changed"
    return " is missing" if before else " is new"


def _databases(folder: Path, names: Iterable[object]) -> Iterator[Path]:
    for name in names:
        with suppress(TaskError):  # the sample that asks for it reports it
            yield database(folder.expanduser(), name)


def _weights(path: str) -> list[str]:
    folder = local_folder(path) or cached_folder(path)
    try:
        return sorted(weight_files(folder)) if folder is not None else []
    except (OSError, ValueError):  # loading the model reports it
        return []
