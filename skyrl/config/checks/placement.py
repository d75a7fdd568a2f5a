"""Checks of placement: models and engines fit the GPUs that they are given, and each other; allocation strings agree
with the fields.

A rule applies only where what it constrains is in use. Whether the cluster has enough GPUs is checked when a run
starts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product

from skyrl.config.checks import warning
from skyrl.config.checks.every_kind import processes_fit_cluster
from skyrl.config.derive.allocation import PATH as ALLOCATION
from skyrl.config.derive.allocation import ROLES, allocation_of, contradictions, strategy_of
from skyrl.config.derive.engine_backends import backend_of, server_urls
from skyrl.config.derive.rl_models import RL_ROLES
from skyrl.config.derive.sizes import (
    draws_rollouts,
    engines_of,
    grid_of,
    models_of,
    on_ray,
    sizes_of,
    starts_engines,
)
from skyrl.config.settings.root import SkyRLTrainConfig
from skyrl.config.settings.strategies import reads
from skyrl.errors import Problem
from skyrl.planning.layout import counted
from skyrl.tree import get_at
from skyrl.tree.code_names import OF_PROGRAM
from skyrl.tree.types import display_value

_ENGINE = "generator.inference_engine"


def one_process_has_one_rank(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Without Ray there is one rank of each model and one engine, which computes on one GPU."""
    if on_ray(run):
        return
    placement, engine = run.trainer.placement, run.generator.inference_engine
    for model in models_of(run):
        for name in (f"{model}_num_nodes", f"{model}_num_gpus_per_node"):
            yield from _require_one(f"trainer.placement.{name}", getattr(placement, name), "ranks do")
    if starts_engines(run):
        yield from _require_one(f"{_ENGINE}.num_engines", engine.num_engines, "engines do")
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        if name in backend_of(engine).fields:
            yield from _require_one(f"{_ENGINE}.{name}", getattr(engine, name), "parts of an engine do")


def colocated_models_share_megatron_degrees(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Megatron-core has one set of process groups per process."""
    shares = run.trainer.placement.colocate_all or run.trainer.placement.colocate_policy_ref
    if not reads(run.trainer, "megatron_config") or not shares:
        return
    others = [model for model in models_of(run) if model != "policy"]
    degrees = ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
    for model, name in product(others, degrees):
        field = f"megatron_config.{name}_parallel_size"
        policy, own = (get_at(run, f"trainer.{item}.{field}") for item in ("policy", model))
        if policy != own:
            yield Problem(
                path=f"trainer.{model}.{field}",
                message=f"{own}, but the policy has {policy}: models in the same processes need the same degrees",
                hint=f"set it to {policy}, or trainer.placement.colocate_all and colocate_policy_ref = false",
            )


def other_processes_find_code(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Code that other processes import is in a file or module: none of them has the program or notebook that runs."""
    elsewhere = {
        "trainer.algorithm.policy_loss_type": (on_ray(run), "the processes of Ray"),
        "environment.env_class": (run.environment.skyrl_gym.isolate_user_env, "isolated environments"),
    }
    for path, (is_sent, where) in elsewhere.items():
        value = get_at(run, path)
        for name in (value,) if isinstance(value, str) else value or ():
            if is_sent and name.startswith(OF_PROGRAM):
                message = f"{name} is defined in the program or notebook that runs, where {where} cannot find it"
                yield Problem(path=path, message=message, hint="write it into a file, and import it from there")


def run_fits_cluster(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """A run has no more processes than the largest clusters have GPUs."""
    yield from processes_fit_cluster(sizes_of(run), "trainer.placement")


def colocated_models_have_equal_ranks(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Models that take turns on the same GPUs have a rank on every one of them."""
    placement = run.trainer.placement
    if not on_ray(run) or not (placement.colocate_all or placement.colocate_policy_ref):
        return
    switch = "colocate_all" if placement.colocate_all else "colocate_policy_ref"
    for model in models_of(run):
        for name in ("num_nodes", "num_gpus_per_node"):
            own, policys = getattr(placement, f"{model}_{name}"), getattr(placement, f"policy_{name}")
            if own != policys:
                yield Problem(
                    path=f"trainer.placement.{model}_{name}",
                    message=f"{own} is not trainer.placement.policy_{name} = {policys}, and the "
                    f"{RL_ROLES[model].title} shares the policy's GPUs (trainer.placement.{switch})",
                    hint=f"set it to {policys}, or give the models GPUs of their own: colocate_all = false and "
                    "colocate_policy_ref = false",
                )


def colocated_engines_use_all_gpus(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """With `colocate_all`, engines and policy take turns on the same GPUs, and use all of them."""
    engines = engines_of(run)
    if engines is None or not on_ray(run) or not run.trainer.placement.colocate_all:
        return
    grid, engine_gpus = grid_of(run, "policy"), engines.number * engines.gpus
    if grid.ranks == engine_gpus:
        return
    fitting, rest = divmod(grid.ranks, engines.gpus)
    fix = f"set it to {fitting}" if not rest else f"give the policy a multiple of {engines.gpus} GPUs"
    yield Problem(
        path=f"{_ENGINE}.num_engines",
        message=f"{counted(engines.number, 'engine')} of {counted(engines.gpus, 'GPU')} (tensor {engines.tensor} x "
        f"pipeline {engines.pipeline} x data {engines.data}) take{'s' if engines.number == 1 else ''} {engine_gpus}, "
        f"and the policy has {grid.ranks} ({counted(grid.nodes, 'node')} of {grid.gpus_per_node}); with "
        "trainer.placement.colocate_all they share them",
        hint=f"{fix}, or give the engines GPUs of their own: trainer.placement.colocate_all = false",
    )


def external_engines_exclude_colocation(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Engines that run already cannot take turns with the policy."""
    if on_ray(run) and run.trainer.placement.colocate_all and draws_rollouts(run) and not starts_engines(run):
        yield Problem(
            path="trainer.placement.colocate_all",
            message="the engines are already running elsewhere, and share no GPUs with this run",
            hint="set trainer.placement.colocate_all = false",
        )


def colocated_engines_release_weights(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Engines that keep their weights need GPUs of their own."""
    shares, engine = run.trainer.placement.colocate_all and run.trainer.device == "cuda", run.generator.inference_engine
    if shares and starts_engines(run) and not backend_of(engine).can_colocate:
        yield Problem(
            path="trainer.placement.colocate_all",
            message=f"{engine.backend} engines do not take turns with learners on the same GPUs",
            hint="set trainer.placement.colocate_all = false, or use vLLM",
        )


def external_engines_have_urls(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Engines that the run does not start have an address."""
    engine = run.generator.inference_engine
    if draws_rollouts(run) and not starts_engines(run) and not (engine.external_proxy_url or server_urls(engine)):
        yield Problem(
            path=f"{_ENGINE}.external_server_urls",
            message="the run starts no engines, and no address of one is given",
            hint=f"list their addresses, or set {_ENGINE}.backend = vllm and run_engines_locally = true",
        )


def external_urls_are_valid(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Each address names a host without a path, and no engine is listed twice."""
    engine = run.generator.inference_engine
    field = "external_server_urls" if engine.external_server_urls else "remote_urls"
    named = [(field, url) for url in server_urls(engine)]
    named += [("external_proxy_url", engine.external_proxy_url)] if engine.external_proxy_url else []
    for name, url in named:
        address = re.fullmatch(r"https?://(\[[0-9a-fA-F:.]+\]|[\w.-]+)(:([0-9]{1,5}))?/?|name:[\w./-]+", url)
        if not address or not 0 < int(address[3] or 80) <= 65535:
            hint = "write http://host:port, https://host:port or name:NAME; a token is named by external_token"
            yield Problem(path=f"{_ENGINE}.{name}", message=f"{url!r} is not the address of a server", hint=hint)
    urls = [url.rstrip("/") for url in server_urls(engine)]
    for url in sorted({url for url in urls if urls.count(url) > 1}):
        message = f"{url} is listed {urls.count(url)} times, and each engine gets weights of its own"
        yield Problem(path=f"{_ENGINE}.{field}", message=message, hint="list it once")


def num_external_engines_matches_urls(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """For engines that are already running, `num_engines` is the number of addresses."""
    engine = run.generator.inference_engine
    urls = len(server_urls(engine))
    if draws_rollouts(run) and not starts_engines(run) and urls and engine.num_engines not in (1, urls):
        message = f"{engine.num_engines} engines, and {urls} addresses of engines that are already running"
        yield Problem(path=f"{_ENGINE}.num_engines", message=message, hint="leave it out: the addresses are counted")


def embedded_engine_is_not_external(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """The embedded engine runs inside a process of the run, so it cannot be one that runs already."""
    engine = run.generator.inference_engine
    elsewhere = engine.external_proxy_url or server_urls(engine) or not engine.run_engines_locally
    if draws_rollouts(run) and elsewhere and starts_engines(run):
        yield Problem(
            path=f"{_ENGINE}.backend",
            message=f"the {engine.backend} engine has no server, but the run uses engines that are already running",
            hint="set it to http, or leave out the addresses and run_engines_locally = false",
        )


def engine_expert_parallel_spans_gpus(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Expert parallelism spreads the experts over all data and tensor GPUs of an engine."""
    engine = run.generator.inference_engine
    if "expert_parallel_size" not in backend_of(engine).fields or engine.expert_parallel_size == 1:
        return
    gpus = engine.data_parallel_size * engine.tensor_parallel_size
    if engine.expert_parallel_size != gpus:
        yield Problem(
            path=f"{_ENGINE}.expert_parallel_size",
            message=f"{engine.expert_parallel_size} is not data x tensor = {engine.data_parallel_size} x "
            f"{engine.tensor_parallel_size} = {gpus}",
            hint=f"set it to {gpus}, or to 1 for none",
        )


def mp_engine_has_one_node(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Child processes (`mp`) run on their parent's node, so an engine on shared GPUs must not span two nodes."""
    engines = engines_of(run)
    if engines is None or not engines.on_one_node or not on_ray(run) or not run.trainer.placement.colocate_all:
        return
    grid = grid_of(run, "policy")
    if grid.ranks == engines.number * engines.gpus and grid.gpus_per_node % engines.gpus:
        yield Problem(
            path=f"{_ENGINE}.distributed_executor_backend",
            message=f"mp keeps an engine on one node, and {engines.gpus} GPUs of an engine do not divide the "
            f"{grid.gpus_per_node} of a node",
            hint="set it to ray, or let tensor x pipeline x data divide trainer.placement.policy_num_gpus_per_node",
        )


def allocation_matches_fields(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """A field that is written as well as the allocation has the allocation's value."""
    for path, (written, expected) in contradictions(run).items():
        yield Problem(
            path=path,
            message=f"{display_value(written)}, but {ALLOCATION} = {run.trainer.placement.allocation} sets it to "
            f"{display_value(expected)}",
            hint="leave one of them out",
        )


def allocation_has_engines_and_learners(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """A run that samples and trains needs engines and learners in its allocation."""
    allocation = allocation_of(run)
    if allocation is None:
        return
    if allocation.kind == "serving alone":
        hint = "add learners, as in vllm:d4+fsdp:d4; `skyrl eval` evaluates a model without any"
        yield Problem(path=ALLOCATION, message="names only engines, but this run trains", hint=hint)
    if allocation.kind == "learning alone" and starts_engines(run):
        hint = "add engines, as in vllm:d4+fsdp:d4"
        yield Problem(path=ALLOCATION, message="names only learners, but this run starts engines", hint=hint)


def allocation_places_every_model(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Each model of the run is a part of its own, or shares the policy's."""
    allocation = allocation_of(run)
    if allocation is None or not allocation.learners:
        return
    if allocation.learner("policy", "actor") is None:
        names = ", ".join(part.name for part in allocation.learners)
        yield Problem(
            path=ALLOCATION,
            message=f"no part is for the policy: the learners are {names}",
            hint="name one of them [actor]",
        )
    known = {"actor", *ROLES}
    for part in allocation.learners:
        if part.name and part.name not in known:
            yield Problem(
                path=ALLOCATION,
                message=f"no model of a run is called {part.name!r}",
                hint=f"the models of this run are {', '.join(models_of(run))}",
            )


def allocation_degrees_are_supported(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """FSDP splits weights, sequences, matrices and experts; pipelines are Megatron's, and so are experts that are split
    otherwise than the attention. One strategy serves a run.
    """
    allocation = allocation_of(run)
    parts = () if allocation is None else allocation.learners
    for part in parts:
        facts = strategy_of(part)
        if part.degrees.pipeline > 1 and "pipeline" not in facts.degrees:
            degree = part.degrees.pipeline
            message = f"{part.learner} learners have no pipeline parallelism, but the pipeline degree is {degree}"
            yield Problem(path=ALLOCATION, message=message, hint="leave it out: d, t, c and e are supported")
        if part.experts is not None and part.experts.tensor > 1 and "expert_tensor" not in facts.degrees:
            message = (
                f"{part.learner} learners split experts by e alone, but their tensor degree is {part.experts.tensor}"
            )
            yield Problem(path=ALLOCATION, message=message, hint="leave it out: d, t, c and e are supported")
    if len({strategy_of(part).table for part in parts}) > 1:
        yield Problem(
            path=ALLOCATION,
            message="some learners use Megatron and some do not",
            hint="use one backend for all learners",
        )


def run_fits_gpu_memory(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """The run fits its kind of GPU by an estimate that counts tensors; allocators differ, so it is only a warning."""
    if (kind := run.trainer.placement.gpu_kind) is None:
        return
    from skyrl.config.estimates.memory_fit import (  # slow to import, and most runs name no kind
        as_arguments,
        described,
        verdict_of,
    )

    verdict = verdict_of(run)
    if verdict is None or verdict.fits:
        return
    settings = verdict.over[0].settings if verdict.over else ("generator.inference_engine.gpu_memory_utilization",)
    hint = f"set {as_arguments(verdict.nearest)}" if verdict.nearest else "use a smaller model or shorter answers"
    yield warning(
        path=settings[0],
        message=f"does not fit {kind}: {described(verdict)}",
        hint=f"{hint}; `skyrl plan` prints every phase",
    )


def _require_one(path: str, number: int, subject: str) -> Iterator[Problem]:
    if number != 1:
        hint = "set trainer.placement.executor = ray, or 1 here"
        yield Problem(path=path, message=f"{number} {subject} not fit into one process", hint=hint)
