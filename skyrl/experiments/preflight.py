"""Checks of this machine before a run starts: packages, GPUs, keys, models, data, folders. Imports nothing heavy.

`PREFLIGHT` has the checks of reinforcement learning, `SUPERVISED_PREFLIGHT` those of supervised runs; `skyrl run` and
`skyrl doctor` report their problems with those of the configuration. `DOCTOR` also calls reward functions. Checks that
need all data and the tokenizer loaded come later, in `skyrl.runs.inputs`.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from skyrl.config import SkyRLTrainConfig, SupervisedConfig
from skyrl.config.derive.engine_backends import backend_of, server_urls
from skyrl.config.derive.every_kind import evaluates, has_flash_attention
from skyrl.config.derive.sizes import draws_rollouts, on_ray, sizes_of, starts_engines
from skyrl.config.foundation.reasoning_tasks import SCHEME, refusal
from skyrl.config.loading.kinds import kind_of, samples_rollouts
from skyrl.config.settings.environment import MCP
from skyrl.config.settings.registry import AdvantageEstimatorRegistry, PolicyLossRegistry
from skyrl.config.settings.run_basics import RunBasics
from skyrl.config.settings.strategies import facts_of
from skyrl.config.settings.trackers import TRACKERS, lacks_of, names_of
from skyrl.data.data_files import data_files, has_files, is_remote
from skyrl.data.hugging_face import dataset_failure
from skyrl.endpoint.client_access import TOKEN_VARIABLE
from skyrl.envs import find_env
from skyrl.envs.mcp.environment import TABLE as MCP_TABLE
from skyrl.envs.mcp.environment import McpTask
from skyrl.envs.registry import ACCEPT_TIER, sandboxed_parts
from skyrl.errors import ConfigError, DataError, Problem, TaskError, UserError
from skyrl.experiments.first_rows import first_rows_can_be_used, supervised_rows_can_be_used
from skyrl.experiments.folder_checks import (
    code_is_unchanged,
    disk_holds_checkpoints,
    folders_belong_to_run,
    folders_can_be_written,
)
from skyrl.experiments.model_checks import (
    answers_fit,
    engine_reuses_prompts,
    expert_ranks_divide_experts,
    megatron_degrees_divide_model,
    model_exists,
    models_exist,
    policy_has_chat_template,
    router_settings_need_experts,
    sequence_ranks_divide_heads,
    tensor_ranks_divide_matrices,
)
from skyrl.hub import similar_path_hint
from skyrl.installation import install_command, package_command
from skyrl.planning.layout import counted, layout
from skyrl.processes.addresses import is_loopback
from skyrl.rollout.agent_runner import agent_of
from skyrl.runs.run_tree import AnyRun
from skyrl.sandbox.sandbox import strongest_tier, why_unavailable, why_weaker
from skyrl.tracking.factory import load_tracker
from skyrl.tracking.metric_table import METRICS, unknown
from skyrl.training.callbacks import load_callback
from skyrl.tree import get_at
from skyrl.tree.names import nearest
from skyrl.tree.rules import Check

_ENGINE = "generator.inference_engine"


def servers_receive_trained_weights(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Servers get the trained weights: samples of a model that never changes are not those of the policy."""
    engine = run.generator.inference_engine
    if not draws_rollouts(run) or starts_engines(run):
        return
    if engine.weight_sync_backend == "none":
        hint = "set it to disk; skyrl eval and skyrl generate take servers with their own weights"
        message = "the engines would never receive the trained weights"
        yield Problem(path=f"{_ENGINE}.weight_sync_backend", message=message, hint=hint)
    elif not server_urls(engine):
        message = "a router cannot receive weights, and no address of an engine behind it is given"
        yield Problem(path=f"{_ENGINE}.external_server_urls", message=message, hint="list the engines' addresses")


def tokens_of_servers_are_there(environ: Mapping[str, str]) -> Check[SkyRLTrainConfig]:
    """The check that the variable with the servers' token is set among these."""

    def servers_have_their_token(run: SkyRLTrainConfig) -> Iterator[Problem]:
        token = run.generator.inference_engine.external_token
        if token is not None and not starts_engines(run) and not environ.get(token.name):
            message = f"the variable {token.name} is not set"
            yield Problem(path=f"{_ENGINE}.external_token", message=message, hint="set it where the run is started")

    return servers_have_their_token


def flash_attention_is_installed(run: AnyRun) -> Iterator[Problem]:
    """If FlashAttention is configured but its package is missing, the run uses torch's attention and warns."""
    table: Any = get_at(run, kind_of(run).trainer)
    falls_back = table.device == "cuda" and table.flash_attn and table.attention == "sdpa"
    if falls_back and not has_flash_attention():
        field = run.trainer.path_of("flash_attn")
        yield Problem(
            path=field,
            message="the package flash-attn is not installed: attention falls back to PyTorch's sdpa",
            hint=f"install flash-attn, or set {field} = false",
            severity="warning",
        )


def alarms_watch_logged_metrics(run: AnyRun) -> Iterator[Problem]:
    """Each alarm watches a metric that skyrl logs. A custom loss may log others, so a violation is a warning."""
    names = [spec.name for _, specs in METRICS for spec in specs]
    for alarm in run.trainer.alarms:
        for missing in unknown(filter(None, (alarm.metric, alarm.against))):
            near = nearest(missing, names)
            yield Problem(
                path=run.trainer.path_of("alarms"),
                message=f"skyrl has no metric {missing}: the alarm never fires unless your own code logs it",
                hint=f"did you mean {near}?" if near else "docs/metrics.md lists all metrics",
                severity="warning",
            )


def the_callbacks_exist(run: AnyRun) -> Iterator[Problem]:
    """Each callback of the configuration exists, and its methods are events."""
    for name in run.trainer.callbacks:
        try:
            load_callback(name, run.trainer.path_of("callbacks"))
        except ConfigError as error:
            yield from error.problems


# One setting of any kind of run.


def missing_data(field: str, sources: Iterable[str]) -> Iterator[Problem]:
    """Each source is an existing file or folder, a name on the hub, or a task of reasoning-gym."""
    for source in sources:
        try:
            reason = _missing(source)
        except DataError as error:
            reason = str(error)
        if reason:
            yield Problem(path=field, message=reason)


def _missing(source: str) -> str | None:
    if source.startswith(SCHEME):
        return refusal(source)
    if is_remote(source):
        return None  # reading it asks the store
    reason = path_error(source)
    if reason or not has_files(source):
        return reason or dataset_failure(source)
    if "*" in source:
        data_files(source)
        return None
    is_there = Path(source).expanduser().is_file()
    return None if is_there else f"there is no file {source}{similar_path_hint(source)}"


def the_checkpoint_exists(run: AnyRun) -> Iterator[Problem]:
    """The checkpoint to resume from exists, if the configuration names one on a disk."""
    path = run.trainer.resume_path
    if not path or "://" in path:
        return
    reason = path_error(path) or (None if Path(path).expanduser().is_dir() else f"there is no folder {path}")
    if reason:
        hint = "" if samples_rollouts(run) else "latest, empty, or a checkpoint"
        yield Problem(path=run.trainer.path_of("resume_path"), message=reason, hint=hint)


def path_error(path: str) -> str | None:
    """Reason why the file system rejects the path, such as the home of a user who does not exist; None if valid."""
    try:
        Path(path).expanduser().exists()
    except (OSError, RuntimeError, ValueError) as error:
        return f"{path[:80]!r} is not a path here: {error}"
    return None


def trackers_can_be_had(run: RunBasics, environ: Mapping[str, str]) -> Iterator[Problem]:
    """The packages of the trackers are installed, and their keys are set."""
    path, settings = run.path_of("logger"), run.trackers
    own = settings.python
    if own is not None and not (Path(own).expanduser().is_file() and os.access(Path(own).expanduser(), os.X_OK)):
        hint = "set it to a Python interpreter"
        yield Problem(path=run.path_of("trackers.python"), message=f"there is no program {own}", hint=hint)
    for name in names_of(run.logger):
        if name not in TRACKERS:
            try:
                load_tracker(name, path)
            except ConfigError as error:
                yield from error.problems
            continue
        mode = getattr(getattr(settings, name, None), "mode", None)
        for lack, remedy in lacks_of(name, mode=mode, environ=environ, elsewhere=own is not None):
            yield Problem(path=path, message=lack, hint=f"{remedy}, or set {path} = console")


# Reinforcement learning.


def packages_are_installed(run: AnyRun) -> Iterator[Problem]:
    """Packages that the chosen strategy, engine and executor import are installed."""
    for field, package, extra in _packages(run):
        if importlib.util.find_spec(package) is None:
            message = f"needs the package {package}, which is not installed"
            hint = install_command(extra) if extra else package_command(package)
            yield Problem(path=field, message=message, hint=hint)


def _packages(run: AnyRun) -> Iterator[tuple[str, str, str]]:
    """For each package: the path that requires it, the package, and the extra that installs it."""
    model = kind_of(run).trained.at("model.path")
    yield model, "torch", "train"
    yield model, "transformers", "train"
    if run.trainer.placement.executor == "ray":
        yield run.trainer.path_of("placement.executor"), "ray", "ray"
    if package := facts_of(run.trainer).package:
        yield run.trainer.path_of("strategy"), package, package
    if samples_rollouts(run):
        yield from _packages_of_rollouts(run)


def _packages_of_rollouts(run: SkyRLTrainConfig) -> Iterator[tuple[str, str, str]]:
    """Packages that only reinforcement learning may need: of the engine, kernels, tools, and the endpoint."""
    backend = backend_of(run.generator.inference_engine)
    if backend.package and draws_rollouts(run):
        yield "generator.inference_engine.backend", backend.package, backend.extra
    if run.trainer.use_liger_kernel and run.trainer.device == "cuda":
        yield "trainer.use_liger_kernel", "liger_kernel", "liger"
    if MCP in run.environment.names and draws_rollouts(run):
        yield f"{MCP_TABLE}.servers", "mcp", "mcp"
    agent = "environment.agent" if run.environment.agent.plays else None
    if draws_rollouts(run) and (run.generator.inference_engine.enable_http_endpoint or agent):
        yield agent or "generator.inference_engine.enable_http_endpoint", "starlette", "serve"
        yield agent or "generator.inference_engine.enable_http_endpoint", "uvicorn", "serve"


def gpus_are_available(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """A run that starts its own Ray, or none, finds its GPUs on this machine."""
    placement = run.trainer.placement
    if run.trainer.device != "cuda" or placement.ray_address is not None:
        return
    try:
        required_gpus = layout(sizes_of(run)).gpus if on_ray(run) else 1
    except ValueError:  # another check reports sizes that do not go together
        return
    gpus = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    if gpus < required_gpus:
        cpu = 'set trainer.device = "auto" or "cpu"' + _if_built_without_cuda()
        elsewhere = "join a cluster with trainer.placement.ray_address, use fewer (see `skyrl plan`), or "
        yield Problem(
            path="trainer.placement.ray_address" if on_ray(run) else "trainer.device",
            message=f"this run needs {counted(required_gpus, 'GPU')}, but this machine has {gpus or 'none'}",
            hint=elsewhere + cpu if on_ray(run) else cpu,
        )


def _if_built_without_cuda() -> str:
    """A remark on a build of torch for CPUs, which no GPU would help."""
    try:
        result = version("torch")
    except PackageNotFoundError:
        return ""
    return f"; the installed torch {result} is built without CUDA" if "+cpu" in result else ""


def keys_are_there(environ: Mapping[str, str]) -> Check[SkyRLTrainConfig]:
    """The check that services that need a key find one in these variables."""

    def services_have_their_keys(run: SkyRLTrainConfig) -> Iterator[Problem]:
        gym, engine = run.environment.skyrl_gym, run.generator.inference_engine
        base_urls = {"llm_as_a_judge": gym.llm_as_a_judge.base_url, "pairwise_judge": gym.pairwise_judge.base_url}
        for judge, url in base_urls.items():  # OpenAI answers no request without a key; another service may
            if url is None and judge in run.environment.judges and not environ.get("OPENAI_API_KEY"):
                path = f"environment.skyrl_gym.{judge}.base_url"
                hint = "set the variable OPENAI_API_KEY, or choose another service that speaks OpenAI's protocol"
                message = "OpenAI, the judge's service, requires a key, but none is set"
                yield Problem(path=path, message=message, hint=hint)
        is_open = engine.enable_http_endpoint and not environ.get(TOKEN_VARIABLE)
        if is_open and not is_loopback(engine.http_endpoint_host):
            yield Problem(
                path="generator.inference_engine.http_endpoint_host",
                message=f"{engine.http_endpoint_host} can be reached from other machines, but no token is set",
                hint=f"set the variable {TOKEN_VARIABLE} to a secret, or use 127.0.0.1",
            )
        yield from trackers_can_be_had(run.trainer, environ)

    return services_have_their_keys


def a_compiler_is_there(environ: Mapping[str, str]) -> Check[SkyRLTrainConfig]:
    """The check that `torch.compile` finds the C++ compiler that it needs on a CPU: CXX among these variables, or one
    of the usual names.
    """

    def compiles(run: SkyRLTrainConfig) -> Iterator[Problem]:
        names = (environ.get("CXX") or "g++", "c++", "clang++")
        compiles_on_cpu = run.trainer.policy.use_torch_compile and run.trainer.device == "cpu"
        if compiles_on_cpu and not any(shutil.which(name, path=environ.get("PATH")) for name in names):
            yield Problem(
                path="trainer.policy.use_torch_compile",
                message="torch.compile calls a C++ compiler on a CPU, but there is none (CXX, g++, c++, clang++)",
                hint="install g++, or set it to false",
            )

    return compiles


def data_files_exist(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Each source exists. Recorded samples need no prompts."""
    if not draws_rollouts(run):
        return
    yield from missing_data("data.train_data", run.data.train_data)
    if evaluates(run.trainer):
        yield from missing_data("data.val_data", run.data.val_data)


def the_task_can_be_imported(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """The environment or reward function of the configuration exists, if it is used."""
    try:
        if run.environment.task is not None and draws_rollouts(run):
            find_env(run.environment.task)
    except TaskError as error:
        yield Problem(path="environment.env_class", message=str(error))
    try:
        if run.environment.agent.plays and draws_rollouts(run):
            agent_of(run.environment.agent, run.environment.skyrl_gym.sandbox_tier)
    except UserError as error:
        yield Problem(path="environment.agent", message=str(error))


def the_sandbox_starts(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """The sandbox of the policy's programs starts here, in the strongest tier or in the one that is chosen."""
    path, tier = "environment.skyrl_gym.sandbox_tier", run.environment.skyrl_gym.sandbox_tier
    if not draws_rollouts(run) or not sandboxed_parts(run.environment, run.environment.names):
        return
    if tier == "auto":
        chosen = strongest_tier()
        if reason := why_weaker(chosen):
            message = f"programs of the policy would run in the tier {chosen!r}: {reason}"
            yield Problem(path=path, message=message, hint=ACCEPT_TIER.format(tier=chosen), severity="warning")
    elif reason := why_unavailable(tier):
        hint = f'the strongest tier that starts here is "{strongest_tier()}"'
        yield Problem(path=path, message=f"{tier!r} does not start here: {reason}", hint=hint)


def mcp_servers_offer_tools(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """The servers of the environment `mcp` start and list their tools, and its reward exists. Starts the servers."""
    gym = run.environment.skyrl_gym
    if MCP not in run.environment.names or not draws_rollouts(run) or importlib.util.find_spec("mcp") is None:
        return
    if gym.mcp.reward is None or not all(server.has_one_place for server in gym.mcp.servers):
        return  # another check reports it
    try:
        task = find_env(MCP, gym)
    except TaskError as error:
        yield Problem(path=f"{MCP_TABLE}.reward", message=str(error))
        return
    assert isinstance(task, McpTask), "the environment mcp is made by one"
    try:
        task.offered()
    except UserError as error:
        yield Problem(path=f"{MCP_TABLE}.servers", message=str(error))


def the_recording_exists(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """The recording to train on exists."""
    path = run.trainer.rollouts_from
    if path is None:
        return
    reason = path_error(path)
    if not reason and not (Path(path).expanduser() / "recording" / "about.json").is_file():
        reason = (
            f"there is no recording in {path or 'an empty path'}: give the folder of a run with trainer.recording on"
        )
    if reason:
        yield Problem(path="trainer.rollouts_from", message=reason)


def custom_algorithms_can_be_called(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """The user's own loss and estimator can be made, and suit a small batch."""
    algorithm = run.trainer.algorithm
    own_loss = PolicyLossRegistry.is_own(algorithm.policy_loss_type)
    if not own_loss and not AdvantageEstimatorRegistry.is_own(algorithm.advantage_estimator):
        return
    from skyrl.training.advantage import advantage_estimator  # torch, for these alone
    from skyrl.training.objective import policy_loss

    answers = run.generator.n_samples_per_prompt
    for try_own in (lambda: policy_loss(algorithm), lambda: advantage_estimator(algorithm, answers)):
        try:
            try_own()
        except ConfigError as error:
            yield from error.problems


_PREFLIGHT: tuple[Check[SkyRLTrainConfig], ...] = (
    packages_are_installed,
    gpus_are_available,
    flash_attention_is_installed,
    keys_are_there(os.environ),
    a_compiler_is_there(os.environ),
    tokens_of_servers_are_there(os.environ),
    servers_receive_trained_weights,
    folders_can_be_written,
    folders_belong_to_run,
    models_exist,
    megatron_degrees_divide_model,
    tensor_ranks_divide_matrices,
    sequence_ranks_divide_heads,
    expert_ranks_divide_experts,
    router_settings_need_experts,
    engine_reuses_prompts,
    policy_has_chat_template,
    answers_fit("sampling_params"),
    data_files_exist,
    the_task_can_be_imported,
    mcp_servers_offer_tools,
    the_checkpoint_exists,
    the_recording_exists,
    alarms_watch_logged_metrics,
    the_callbacks_exist,
    disk_holds_checkpoints,
    code_is_unchanged,
    custom_algorithms_can_be_called,
)

PREFLIGHT = (*_PREFLIGHT, first_rows_can_be_used(judge=False))

DOCTOR = (*_PREFLIGHT, the_sandbox_starts, first_rows_can_be_used(judge=True))


# Supervised runs.


def the_trackers_are_there(run: AnyRun) -> Iterator[Problem]:
    """The packages of the trackers are installed, and their keys are set."""
    yield from trackers_can_be_had(run.trainer, os.environ)


def the_rows_are_there(run: SupervisedConfig) -> Iterator[Problem]:
    """Each source exists."""
    yield from missing_data("train_datasets", run.train_datasets)
    yield from missing_data("eval_datasets", run.eval_datasets)


def the_template_is_there(run: SupervisedConfig) -> Iterator[Problem]:
    """A file that replaces the chat template can be read."""
    template = run.chat_template
    if template.source == "file" and template.name_or_path and not Path(template.name_or_path).expanduser().is_file():
        yield Problem(path="chat_template.name_or_path", message=f"there is no file {template.name_or_path}")


_SUPERVISED_PREFLIGHT: tuple[Check[Any], ...] = (
    packages_are_installed,
    flash_attention_is_installed,
    the_trackers_are_there,
    model_exists,
    megatron_degrees_divide_model,
    sequence_ranks_divide_heads,
    tensor_ranks_divide_matrices,
    expert_ranks_divide_experts,
    the_rows_are_there,
    the_template_is_there,
    folders_can_be_written,
    folders_belong_to_run,
    the_checkpoint_exists,
    alarms_watch_logged_metrics,
    the_callbacks_exist,
)

SUPERVISED_PREFLIGHT = (*_SUPERVISED_PREFLIGHT, supervised_rows_can_be_used(all_rows=False))

SUPERVISED_DOCTOR = (*_SUPERVISED_PREFLIGHT, supervised_rows_can_be_used(all_rows=True))
