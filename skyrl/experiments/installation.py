"""What a run needs beside its files: packages, GPUs, keys. Looked at without importing any of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from skyrl.config import SkyRLTrainConfig
from skyrl.config.engines import backend_of
from skyrl.config.sizes import on_ray, sizes_of
from skyrl.config.trackers import TRACKERS
from skyrl.config.unimplemented import Unimplemented
from skyrl.errors import Problem
from skyrl.experiments import on_machine
from skyrl.planning.sizes import layout
from skyrl.tree.rules import Check


def packages_are_installed(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Packages that the chosen strategy, engine and executor import are installed."""
    yield from on_machine.packages(_packages(run))


def there_are_gpus_for_it(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """A run that starts its own Ray, or none, finds its GPUs on this machine."""
    placement = run.trainer.placement
    if run.trainer.device != "cuda" or placement.ray_address is not None:
        return
    try:
        wanted = layout(sizes_of(run)).gpus if on_ray(run) else 1
    except ValueError:  # sizes that do not go together: told by another check
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
        """OpenAI answers nobody without one; another service may."""
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


INSTALLATION: tuple[Check[SkyRLTrainConfig], ...] = (
    packages_are_installed,
    there_are_gpus_for_it,
    this_version_has_the_trackers,
)


def _packages(run: SkyRLTrainConfig) -> Iterator[tuple[str, str, str]]:
    """The path that asks for it, the package, and the extra that brings it."""
    yield "trainer.policy.model.path", "torch", "train"
    yield "trainer.policy.model.path", "transformers", "train"
    if on_ray(run):
        yield "trainer.placement.executor", "ray", "ray"
    backend = backend_of(run.generator.inference_engine)
    if backend.package:
        yield "generator.inference_engine.backend", backend.package, backend.extra
    logger = run.trainer.logger
    for name in (logger,) if isinstance(logger, str) else logger:
        if name in TRACKERS and TRACKERS[name].package:
            yield "trainer.logger", TRACKERS[name].package, TRACKERS[name].extra
    if run.trainer.strategy == "deepspeed":
        yield "trainer.strategy", "deepspeed", "deepspeed"
