"""Prompts in, groups of rewarded trajectories out."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any, TypeVar

from skyrl.config import GeneratorConfig, SamplingParams, SkyRLGymConfig, SkyRLLoraConfig
from skyrl.envs import EnvStep
from skyrl.envs.registry import MakeEnv, find_task
from skyrl.errors import RewardError
from skyrl.inference.client import InferenceEngineClient
from skyrl.inference.engine import Completion, GenerationRequest, SampleKey
from skyrl.trajectory import Prompt, Trajectory, TrajectoryGroup, TurnReward

T = TypeVar("T")


class SkyRLGymGenerator:
    """Samples n answers to each prompt with an inference engine and lets the prompt's environment reward each of them.

    Knows nothing of training: it is built from the generator's own settings, and told for each call what is sampled.
    """

    def __init__(
        self,
        model_path: str,
        lora_config: SkyRLLoraConfig,
        generator_cfg: GeneratorConfig,
        skyrl_gym_cfg: SkyRLGymConfig,
        inference_engine_client: InferenceEngineClient,
        tokenizer: Any,
        *,
        user_env_class: str | None = None,
        seed: int = 0,
    ) -> None:
        """`user_env_class` is the task that the user's configuration names: the only import path that is ever
        followed.
        """
        self.model_path = model_path
        self.lora_config = lora_config
        self._config = generator_cfg
        self._client = inference_engine_client
        self._tokenizer = tokenizer
        self._seed = seed
        self._user_env_class = user_env_class
        self._env_workers = ThreadPoolExecutor(skyrl_gym_cfg.max_env_workers, thread_name_prefix="environment")

    async def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        sampling: SamplingParams,
        samples_per_prompt: int,
        weight_version: int,
        purpose: str = "train",
        attempt: int = 0,
    ) -> tuple[TrajectoryGroup, ...]:
        """One group for each prompt, in order.

        `purpose` (`train`, `eval` or `baseline`), `weight_version` and `attempt`, which tells several draws by the same
        weights apart, go into the seed of every sample. Raises `RewardError` if an
        environment fails or gives a reward that is not finite, another `RunError` if the engine fails.
        """
        makers = [find_task(prompt.env_class, self._user_env_class) for prompt in prompts]
        groups = [
            self._group(prompt, make, sampling, samples_per_prompt, weight_version, purpose, attempt)
            for prompt, make in zip(prompts, makers, strict=True)
        ]
        return tuple(await _all(groups))

    async def _group(
        self,
        prompt: Prompt,
        make: MakeEnv,
        sampling: SamplingParams,
        samples: int,
        weight_version: int,
        purpose: str,
        attempt: int,
    ) -> TrajectoryGroup:
        keys = tuple(
            SampleKey(
                run_seed=self._seed,
                weight_version=weight_version,
                prompt_id=prompt.id,
                sample_index=index,
                attempt=attempt,
                purpose=purpose,
            )
            for index in range(samples)
        )
        request = GenerationRequest(prompt_ids=prompt.token_ids, sampling=sampling, keys=keys)
        completions = await self._client.generate(request)
        trajectories = await _all(
            [self._judge(prompt, make, index, completion) for index, completion in enumerate(completions)]
        )
        return TrajectoryGroup(prompt=prompt, trajectories=tuple(trajectories))

    async def _judge(self, prompt: Prompt, make: MakeEnv, index: int, completion: Completion) -> Trajectory:
        loop = asyncio.get_running_loop()
        reward, metrics = await loop.run_in_executor(self._env_workers, judge, make, prompt, completion.text)
        if self._config.zero_reward_on_non_stop and completion.stop_reason != "stop":
            reward = 0.0
        return Trajectory(
            prompt_id=prompt.id,
            sample_index=index,
            prompt_ids=prompt.token_ids,
            response_ids=completion.token_ids,
            loss_mask=self._loss_mask(completion),
            rollout_logprobs=completion.logprobs,
            weight_versions=completion.weight_versions,
            rewards=(TurnReward(token=len(completion.token_ids) - 1, reward=reward),),
            stop_reason=completion.stop_reason,
            metrics=metrics,
        )

    def _loss_mask(self, completion: Completion) -> tuple[int, ...]:
        """Every token was sampled; overlong filtering leaves out of the loss what did not come to an end."""
        cut_off = self._config.apply_overlong_filtering and completion.stop_reason != "stop"
        return (0 if cut_off else 1,) * len(completion.token_ids)


async def _all(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run side by side. The first failure ends the others, quietly, before it is raised."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def judge(make: MakeEnv, prompt: Prompt, answer: str) -> tuple[float, dict[str, float]]:
    """Reward and metrics of one answer, from a fresh environment that is closed whatever happens.

    Raises `RewardError` with the answer if the environment fails, or gives anything but finite numbers.
    """
    where = f"{prompt.env_class}, judging an answer to prompt {prompt.id} ({answer[:80]!r}),"
    try:
        env = make(prompt.extras)
        with closing(env):
            env.init(prompt.messages)
            step = env.step(answer)
            metrics = env.get_metrics()
    except (Exception, SystemExit) as error:
        raise RewardError(f"{where} raised {type(error).__name__}: {error}") from error
    if not isinstance(step, EnvStep):
        raise RewardError(f"{where} returned {step!r} from step() instead of an EnvStep")
    if not step.done:
        raise RewardError(f"{where} wants another turn, but generator.max_turns is 1")
    numbers = {name: _number(value, f"{where} measured {name} =") for name, value in metrics.items()}
    return _number(step.reward, f"{where} gave the reward"), numbers


def _number(value: Any, what: str) -> float:
    """Any kind of finite number, as a float."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, str) or not math.isfinite(number):
        raise RewardError(f"{what} {value!r}, which is not a finite number")
    return number
