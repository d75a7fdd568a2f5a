"""Engines, prompts and environments of a run without its learners, for evaluation and generation.

The policy is the complete model at `trainer.policy.model.path`, which the engines load themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, TypeVar

from skyrl.config import SkyRLTrainConfig
from skyrl.config.derive.sizes import on_ray, sizes_of, starts_engines
from skyrl.endpoint.client_access import Address
from skyrl.errors import Problem, Stopped
from skyrl.experiments.factories import (
    NO_ADAPTERS,
    EngineAdapters,
    engine_makers,
    engine_restarts,
    server_engines,
    start_processes,
)
from skyrl.experiments.first_rows import first_rows_can_be_used
from skyrl.experiments.model_checks import answers_fit, models_exist, policy_has_chat_template
from skyrl.experiments.policy_sampling import PolicySampling
from skyrl.experiments.preflight import (
    keys_are_there,
    missing_data,
    packages_are_installed,
    the_task_can_be_imported,
    tokens_of_servers_are_there,
)
from skyrl.inference.engine import InferenceEngine
from skyrl.inference.pool.restarts import EngineRestarts
from skyrl.planning.layout import layout_of_engines
from skyrl.processes.event_loop import event_loop
from skyrl.processes.handles import Processes
from skyrl.processes.progress import WaitReporter
from skyrl.runs.inputs import notice
from skyrl.tree.rules import Check

R = TypeVar("R")


class StandaloneSampling(PolicySampling):
    """Samples from a model that is not trained. Single use.

    Example: `StandaloneSampling(run).sample(work)`, where `work` is a coroutine function that uses `generator`.
    """

    def __init__(self, cfg: SkyRLTrainConfig, *, adapters: EngineAdapters = NO_ADAPTERS) -> None:
        """`adapters` are those of other policies on the same base."""
        super().__init__(cfg)
        self.adapters = adapters

    def get_processes(self) -> Processes:
        """Processes of the engines."""
        return start_processes(self.cfg, layout_of_engines(sizes_of(self.cfg)) if on_ray(self.cfg) else None)

    def get_engines(self) -> Sequence[InferenceEngine]:
        """The engines. Servers that run already sample with the weights that they have."""
        if not starts_engines(self.cfg):
            return server_engines(self.cfg, takes_weights=False)
        return self.start_engines(engine_makers(self.cfg, self.adapters))

    def get_restarts(self, engines: Sequence[InferenceEngine]) -> EngineRestarts | None:
        """Starts engines again, which take adapters as the first ones."""
        return engine_restarts(self.cfg, self.processes, engines, self.adapters)

    def admitting(self, engine: InferenceEngine) -> AbstractAsyncContextManager[None]:
        """The block in which a restarted engine is taken into service."""
        return nullcontext()

    def check_inputs(self) -> Mapping[str, object] | None:
        """Check the evaluation prompts and the model. Returns the sandbox in which answers are judged, if any."""
        return self.check_prompts(None, self.eval_dataset)

    def sample(self, work: Callable[[], Coroutine[Any, Any, R]]) -> R:
        """Start the engines, run `work`, and end everything that was started. Raises `Stopped` on a signal or at the
        deadline.
        """
        try:
            with self.shutdown, WaitReporter(self.progress, notice), self.resources:
                with self.shutdown.in_loop(), event_loop() as run:
                    result: R = run(self._run_with_engines(work))
                return result
        except Stopped:
            raise self.shutdown.stopped("Nothing was finished: the same command starts from scratch.") from None

    async def _run_with_engines(self, work: Callable[[], Coroutine[Any, Any, R]]) -> R:
        client = self.client
        self.open_endpoint()
        try:
            with self.shutdown.interruptible():
                return await client.run_with_restarts(work(), self.admitting)
        finally:
            await self.close_endpoint()
            await client.close()

    def get_endpoint_address(self) -> Address | None:
        """The address for agents: unlike a training run, this serves no clients."""
        return self.address_of_agents


def the_prompts_exist(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Each source of evaluation prompts exists."""
    if not run.data.val_data:
        yield Problem(path="data.val_data", message="is empty: give the prompts to sample answers to")
    yield from missing_data("data.val_data", run.data.val_data)


def packages_for_sampling(run: SkyRLTrainConfig) -> Iterator[Problem]:
    """Packages that the engine and the executor import are installed; that of the learners' strategy is not needed."""
    yield from (problem for problem in packages_are_installed(run) if problem.path != "trainer.strategy")


model_checks: tuple[Check[SkyRLTrainConfig], ...] = (
    packages_for_sampling,
    models_exist,
    policy_has_chat_template,
    answers_fit("sampling_params"),
)
"""Checks of the machine before clients sample from a model."""


def preflight(environ: Mapping[str, str], *, rewarded: bool) -> tuple[Check[SkyRLTrainConfig], ...]:
    """Checks of the machine before a model is sampled from, and before its answers are `rewarded` by environments.
    `environ` has the keys of services.
    """
    model = (packages_for_sampling, models_exist, policy_has_chat_template, answers_fit("eval_sampling_params"))
    sampling_checks = (tokens_of_servers_are_there(environ), *model, the_prompts_exist)
    judges = (keys_are_there(environ), the_task_can_be_imported, first_rows_can_be_used(judge=False, training=False))
    return (*sampling_checks, *judges) if rewarded else sampling_checks
