"""Prompts in, groups of rewarded trajectories out."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

from skyrl.config import GeneratorConfig, SamplingParams, SkyRLGymConfig, SkyRLLoraConfig
from skyrl.envs import Env, EnvStep, find_env
from skyrl.envs.registry import MakeEnv, registered_names
from skyrl.errors import TaskError
from skyrl.inference.client import InferenceEngineClient
from skyrl.inference.engine import Completion, GenerationRequest, SampleKey
from skyrl.trajectory import Prompt, Trajectory, TrajectoryGroup, TurnReward


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
        self._env_slots = asyncio.Semaphore(skyrl_gym_cfg.max_env_workers)
        self._makers: dict[str, MakeEnv] = {}

    async def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        sampling: SamplingParams,
        samples_per_prompt: int,
        weight_version: int,
        purpose: str = "train",
    ) -> tuple[TrajectoryGroup, ...]:
        """One group for each prompt, in order.

        `purpose` (`train` or `eval`) and `weight_version` go into the seed of every sample. Raises `TaskError` if an
        environment fails or gives a reward that is not finite, `RunError` if the engine fails.
        """
        makers = [self._maker(prompt.env_class) for prompt in prompts]  # a bad name fails before anything is sampled
        groups = [
            self._group(prompt, make, sampling, samples_per_prompt, weight_version, purpose)
            for prompt, make in zip(prompts, makers, strict=True)
        ]
        return tuple(await asyncio.gather(*groups))

    async def _group(
        self, prompt: Prompt, make: MakeEnv, sampling: SamplingParams, samples: int, weight_version: int, purpose: str
    ) -> TrajectoryGroup:
        keys = tuple(
            SampleKey(
                run_seed=self._seed,
                weight_version=weight_version,
                prompt_id=prompt.id,
                sample_index=index,
                purpose=purpose,
            )
            for index in range(samples)
        )
        request = GenerationRequest(prompt_ids=prompt.token_ids, sampling=sampling, keys=keys)
        completions = await self._client.generate(request)
        trajectories = await asyncio.gather(
            *(self._judge(prompt, make, index, completion) for index, completion in enumerate(completions))
        )
        return TrajectoryGroup(prompt=prompt, trajectories=tuple(trajectories))

    async def _judge(self, prompt: Prompt, make: MakeEnv, index: int, completion: Completion) -> Trajectory:
        async with self._env_slots:
            step, metrics = _play(make, prompt, completion.text)
        if not math.isfinite(step.reward):
            raise TaskError(
                f"{prompt.env_class} gave the reward {step.reward} for {prompt.id} (answer {completion.text[:80]!r})"
            )
        reward = step.reward
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

    def _maker(self, env_class: str) -> MakeEnv:
        if env_class not in self._makers:
            if env_class != self._user_env_class and env_class not in registered_names():
                raise TaskError(
                    f"a row of the data names the environment {env_class!r}, which is not registered. Import paths "
                    f"are followed from environment.env_class only. Registered: {', '.join(registered_names())}"
                )
            self._makers[env_class] = find_env(env_class)
        return self._makers[env_class]


def _play(make: MakeEnv, prompt: Prompt, answer: str) -> tuple[EnvStep, dict[str, float]]:
    """One turn in a fresh environment, which is closed whatever happens."""
    env: Env = make(prompt.extras)
    try:
        env.init(prompt.messages)
        return env.step(answer), env.get_metrics()
    except TaskError:
        raise
    except Exception as error:
        raise TaskError(
            f"the environment {prompt.env_class} raised {type(error).__name__}: {error} on {prompt.id} "
            f"(answer {answer[:80]!r})"
        ) from error
    finally:
        env.close()
