"""A model behind the HTTP endpoint, without training: `skyrl serve`."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from skyrl.config import SkyRLTrainConfig
from skyrl.config.load import compose
from skyrl.config.sizes import workers_of_an_engine
from skyrl.endpoint.doors import Address
from skyrl.errors import Problem, Stopped, UserError
from skyrl.tools.sampling_target import Target, stored_configuration
from skyrl.tree.rules import Check

LONGEST = 32_768
"""Most tokens of prompt and answer together, for models that could read more; `trainer.max_prompt_length` and
`generator.sampling_params.max_generate_length` set another limit."""

_ENGINE = "generator.inference_engine."
_PROMPT = "trainer.max_prompt_length"


def serve(
    target: Target,
    files: Sequence[str],
    overrides: Sequence[str],
    address: Address,
    *,
    takes_weights: bool = False,
    warn: Callable[[Sequence[Problem]], None],
    say: Callable[[str], None],
) -> None:
    """Answer requests until a signal comes. `say` is given the address once the engines are there.

    Settings are those of a run: the target's own where `files` is empty. With `takes_weights`, clients may pause the
    engines and replace their weights. Raises `ConfigError` and `UserError`.
    """
    with TemporaryDirectory(prefix="skyrl-serve-") as scratch:
        model = target.model if target.checkpoint is None else _stored(target, Path(scratch) / "model")
        run = _configured(files or stored_configuration(target), overrides, model, Path(scratch), warn)
        _serve(run, target.name, address, say, takes_weights)


def _serve(run: SkyRLTrainConfig, name: str, address: Address, say: Callable[[str], None], takes_weights: bool) -> None:
    from skyrl.endpoint.control import EngineControl
    from skyrl.endpoint.server import serving
    from skyrl.experiments.served_policy import served_policy
    from skyrl.experiments.standalone import StandaloneSampling

    sampling = StandaloneSampling(run)

    async def work() -> None:
        policy, client = served_policy(run, name=name), sampling.client
        control = EngineControl(client, workers=workers_of_an_engine(run)) if takes_weights else None
        generate = client.generate if control is None else control.generate
        async with serving(policy, sampling.tokenizer, generate, address, control) as endpoint:
            say(f"{policy.names[0]} at {endpoint.url}/v1")
            await asyncio.Event().wait()

    with suppress(Stopped):  # how a service is meant to end
        sampling.sample(work)


def _stored(target: Target, folder: Path) -> str:
    from skyrl.tools.exporting import export

    assert target.checkpoint is not None
    export(target.checkpoint, step=target.step, to=folder, checkpoints=target.checkpoint.absolute().parent)
    return str(folder)


def _configured(
    files: Sequence[str],
    overrides: Sequence[str],
    model: str,
    scratch: Path,
    warn: Callable[[Sequence[Problem]], None],
) -> SkyRLTrainConfig:
    from skyrl.experiments.standalone import model_checks

    written = {override.partition("=")[0] for override in overrides}
    changes = [*overrides, f"trainer.policy.model.path={model}", "trainer.policy.model.lora.rank=0"]
    changes += [f"trainer.{name}={scratch}" for name in ("run_path", "export_path", "ckpt_path", "log_path")]
    if not files and f"{_ENGINE}backend" not in written:
        changes.append(f"{_ENGINE}backend={'vllm' if importlib.util.find_spec('vllm') else 'torch'}")
    if _PROMPT not in written:
        changes.append(f"{_PROMPT}={_longest_prompt(_composed(files, changes)[0])}")
    run, warnings = _composed(files, changes, model_checks)
    warn([warning for warning in warnings if warning.path in written])
    return run


def _composed(
    files: Sequence[str], overrides: Sequence[str], also: Sequence[Check[Any]] = ()
) -> tuple[SkyRLTrainConfig, Sequence[Problem]]:
    """The configuration, resolved and checked, and its warnings. Raises `UserError` for one of another kind."""
    composed = compose(files, overrides, also=lambda _: also, environ=os.environ)
    if not isinstance(composed.config, SkyRLTrainConfig):
        raise UserError(f"kind = {composed.config.kind}: name a reinforcement-learning configuration")
    return composed.config, composed.warnings


def _longest_prompt(run: SkyRLTrainConfig) -> int:
    """All that the model can read, less the answer."""
    from skyrl.config.model_overrides import engine_overrides
    from skyrl.models.loading import max_positions

    positions = max_positions(run.trainer.policy.model.path or "", engine_overrides(run)) or LONGEST
    return max(1, min(positions, LONGEST) - run.generator.sampling_params.max_generate_length)
