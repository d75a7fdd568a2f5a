"""Serves a model over the HTTP endpoint without training: `skyrl serve`."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from skyrl.config import SkyRLTrainConfig
from skyrl.config.derive.engine_backends import backend_of
from skyrl.config.derive.sizes import starts_engines, workers_of_an_engine
from skyrl.endpoint.client_access import Address
from skyrl.errors import Problem, Stopped, UserError
from skyrl.tools.sampling_target import (
    WITHOUT_ENVIRONMENT,
    Target,
    compose_sampling,
    model_of,
    stored_configuration,
)
from skyrl.tree import FrozenDict

LONGEST = 32_768
"""Default limit on the tokens of prompt and answer together, for models with a longer context;
`trainer.max_prompt_length` and `generator.sampling_params.max_generate_length` set another limit."""

_ENGINE = "generator.inference_engine."
_PROMPT, _ANSWER = "trainer.max_prompt_length", "generator.sampling_params.max_generate_length"


def serve(
    target: Target,
    files: Sequence[str],
    overrides: Sequence[str],
    address: Address,
    *,
    takes_weights: bool = False,
    adapters: Mapping[str, str] = FrozenDict(),
    warn: Callable[[Sequence[Problem]], None],
    say: Callable[[str], None],
) -> None:
    """Answer requests until a signal arrives. `say` is called with the address once the engines are ready.

    Settings are those of a run: the target's own if `files` is empty. Nothing is rewarded, so the task's code is not
    loaded. With `takes_weights`, clients may pause the engines and replace their weights. `adapters` are additional
    models: name -> folder of a LoRA adapter on this model. Raises `ConfigError` and `UserError`.
    """
    if takes_weights and adapters:
        raise UserError(
            "--takes-weights lets a run replace the weights that the adapters are for: pass only one of the two"
        )
    own = stored_configuration(target)
    files, overrides = files or own, (*overrides, *WITHOUT_ENVIRONMENT)
    if target.checkpoint is not None:  # report errors before weights are written
        compose_sampling(files, [*overrides, f"trainer.policy.model.path={target.model}"])
    with TemporaryDirectory(prefix="skyrl-serve-") as scratch:
        model = model_of(target, Path(scratch) / "model")
        from skyrl.experiments.standalone import model_checks

        written = {override.partition("=")[0] for override in overrides}
        changes = [*overrides, f"trainer.policy.model.path={model}", "trainer.policy.model.lora.rank=0"]
        changes += [f"trainer.{name}={scratch}" for name in ("run_path", "export_path", "ckpt_path", "log_path")]
        if not files and f"{_ENGINE}backend" not in written:
            changes.append(f"{_ENGINE}backend={'vllm' if importlib.util.find_spec('vllm') else 'torch'}")
        changes += _lengths(compose_sampling(files, changes).config, written, answer_is_ours=not files)
        composed = compose_sampling(files, changes, lambda _: model_checks)
        told = written - {f"{_ENGINE}fully_sharded_loras"} if adapters else written
        warn([problem for problem in composed.warnings if problem.path in told])
        run = composed.config
        engine = run.generator.inference_engine
        if adapters and not (backend_of(engine).serves_adapters and starts_engines(run)):
            given = f"{_ENGINE}backend = {engine.backend}"
            raise UserError(f"--adapter works only with torch or vllm engines that skyrl starts ({given})")
        if adapters and engine.rollout_dtype == "int8":
            raise UserError(f"--adapter does not work with 8-bit weights: set {_ENGINE}rollout_dtype = bfloat16")
        _serve(run, target.name, address, say, takes_weights, adapters)


def _serve(
    run: SkyRLTrainConfig,
    name: str,
    address: Address,
    say: Callable[[str], None],
    takes_weights: bool,
    adapters: Mapping[str, str],
) -> None:
    from skyrl.endpoint.control import EngineControl
    from skyrl.endpoint.http.server import serving
    from skyrl.experiments.factories import EngineAdapters
    from skyrl.experiments.policy_sampling import served_policy
    from skyrl.experiments.standalone import StandaloneSampling

    policy = served_policy(run, name=name, adapters=tuple(adapters))
    if conflicts := set(policy.names) & set(adapters):
        raise UserError(f"--adapter {min(conflicts)}: this is the name of the model itself; choose another name")
    sampling = StandaloneSampling(run, adapters=EngineAdapters(stored=adapters))

    async def work() -> None:
        client = sampling.client
        control = EngineControl(client, workers=workers_of_an_engine(run)) if takes_weights else None
        generate = client.generate if control is None else control.generate
        async with serving(policy, sampling.tokenizer, generate, address, control) as endpoint:
            say(f"{', '.join((policy.names[0], *adapters))} at {endpoint.url}/v1")
            await asyncio.Event().wait()

    with suppress(Stopped):  # the regular end of a service
        sampling.sample(work)


def _lengths(run: SkyRLTrainConfig, written: Collection[str], *, answer_is_ours: bool) -> Iterator[str]:
    """Overrides of lengths that the user has not `written`. The prompt gets all positions of the model except the
    answer's. If `answer_is_ours` and the default answer does not fit, it is set to half of the positions.
    """
    from skyrl.config.derive.model_overrides import engine_overrides
    from skyrl.models.files.loading import max_positions

    most = max_positions(run.trainer.policy.model.path or "", engine_overrides(run)) or LONGEST
    positions, answer = min(most, LONGEST), run.generator.sampling_params.max_generate_length
    if answer_is_ours and _ANSWER not in written and answer >= positions:
        answer = positions // 2
        yield f"{_ANSWER}={answer}"
    if _PROMPT not in written:
        yield f"{_PROMPT}={max(1, positions - answer)}"
