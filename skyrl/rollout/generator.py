"""Prompts in, groups of rewarded trajectories out. How one sample goes is in `episode.py`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from functools import cached_property
from typing import Any, TypeVar

from attrs import evolve

from skyrl.config import GeneratorConfig, SamplingParams, SkyRLGymConfig, SkyRLLoraConfig
from skyrl.envs.registry import MakeEnv, find_task
from skyrl.errors import RunError
from skyrl.inference.client import InferenceEngineClient
from skyrl.inference.engine import Completion, GenerationRequest, SampleKey
from skyrl.models.chat_templates import with_template
from skyrl.rollout.chats import Chat, chat_of
from skyrl.rollout.env_calls import EnvCalls, EpisodeError
from skyrl.rollout.episode import Episode, Stage
from skyrl.rollout.failures import FailureTally
from skyrl.rollout.filters import filled, silenced
from skyrl.trajectory import Failure, Prompt, Trajectory, TrajectoryGroup

T = TypeVar("T")

_RETRY = 2**16
"""Added to the attempt of a sample that is drawn again: more than there are attempts at a batch."""

_MANY = 2**62


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
        self._gym = skyrl_gym_cfg
        self._client = inference_engine_client
        self._tokenizer = with_template(tokenizer, generator_cfg.chat_template)
        self._seed = seed
        self._user_env_class = user_env_class

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
        weights apart, go into the seed of every sample. Raises `RewardError` if environments fail more often than
        `max_failed_share` allows, another `RunError` if the engine fails.
        """
        session = self.session(
            sampling=sampling,
            samples_per_prompt=samples_per_prompt,
            purpose=purpose,
            samples=len(prompts) * samples_per_prompt,
            together=len(prompts) if self._config.batched else None,
        )
        for prompt in prompts:
            session.task_of(prompt)  # a wrong one is refused before anything is sampled
        groups = [session.group(prompt, weight_version=weight_version, attempt=attempt) for prompt in prompts]
        return tuple(await _all(groups))

    def session(
        self,
        *,
        sampling: SamplingParams,
        samples_per_prompt: int,
        samples: int,
        purpose: str = "train",
        together: int | None = None,
    ) -> Session:
        """For groups that are sampled one by one and share limits: on trajectories, environments and failures.

        Failures are counted over `samples` samples. `together`: as many groups are asked for at once, and none is
        judged before all are sampled.
        """
        stage = Stage(
            config=self._config,
            sampling=sampling,
            client=self._client,
            tokenizer=self._tokenizer,
            chat=lambda: self._chat,
            call=EnvCalls(self._gym.max_env_workers, self._gym.step_timeout_seconds),
        )
        key = SampleKey(run_seed=self._seed, weight_version=0, prompt_id="", sample_index=0, purpose=purpose)
        return Session(
            stage,
            self._gym,
            FailureTally(samples, self._gym.max_failed_share),
            key,
            samples_per_prompt=samples_per_prompt,
            user_env_class=self._user_env_class,
            together=together,
        )

    @cached_property
    def _chat(self) -> Chat:
        return chat_of(self._config, self._tokenizer)


class Session:
    """Groups that share a stage and a tally of failures; `SkyRLGymGenerator.session` makes one."""

    def __init__(
        self,
        stage: Stage,
        gym: SkyRLGymConfig,
        tally: FailureTally,
        key: SampleKey,
        *,
        samples_per_prompt: int,
        user_env_class: str | None,
        together: int | None,
    ) -> None:
        """`key` names the samples but for their prompt, weights and attempt."""
        self.tally = tally
        self._stage, self._gym, self._key = stage, gym, key
        self._samples, self._user_env_class = samples_per_prompt, user_env_class
        self._attempts, self._retried = gym.max_attempts, frozenset(gym.retried_failures)
        self._seconds, self._fills = gym.trajectory_timeout_seconds, gym.failed_samples == "fill"
        self._all_sampled = asyncio.Barrier(together) if together else None
        self._slots = asyncio.Semaphore(
            max(1, (stage.config.max_trajectories_in_flight or _MANY) // samples_per_prompt)
        )

    def task_of(self, prompt: Prompt) -> MakeEnv:
        """What makes its environment. Raises `TaskError`."""
        return find_task(prompt.env_class, self._user_env_class, self._gym)

    async def group(self, prompt: Prompt, *, weight_version: int, attempt: int = 0) -> TrajectoryGroup:
        """All samples of a prompt; see `SkyRLGymGenerator.generate`."""
        key = evolve(self._key, prompt_id=prompt.id, weight_version=weight_version, attempt=attempt)
        keys = [evolve(key, sample_index=index) for index in range(self._samples)]
        async with self._slots:
            return await self._group(prompt, self.task_of(prompt), keys)

    async def _group(self, prompt: Prompt, make: MakeEnv, keys: Sequence[SampleKey]) -> TrajectoryGroup:
        """Their first turn is one request, so that the prompt is prefilled once."""
        episodes = [Episode(self._stage, prompt, make, key) for key in keys]
        try:
            begun = await _all([_outcome(episode.begin()) for episode in episodes])
            first = await self._first_turns(episodes, begun)
            if self._all_sampled:
                await self._all_sampled.wait()
            starts = zip(episodes, begun, first, strict=True)
            trajectories = await _all([self._sample(episode, request, answer) for episode, request, answer in starts])
        finally:
            await _all([_outcome(episode.close()) for episode in episodes])
        group = TrajectoryGroup(prompt=prompt, trajectories=tuple(trajectories))
        group = filled(group) if self._fills else group
        return silenced(group) if group.dropped else group  # it keeps the batch as large as it has to be

    async def _first_turns(
        self, episodes: Sequence[Episode], begun: Sequence[GenerationRequest | Failure]
    ) -> list[Completion | None]:
        """The first completion of each episode that began; those that begin with the same tokens ask together."""
        alike: dict[tuple[int, ...], list[int]] = {}
        for place, (episode, request) in enumerate(zip(episodes, begun, strict=True)):
            if isinstance(request, GenerationRequest) and not episode.too_long:
                alike.setdefault(request.prompt_ids, []).append(place)
        completions: list[Completion | None] = [None] * len(episodes)

        async def ask(ids: tuple[int, ...], places: list[int]) -> None:
            start = time.perf_counter()
            keys = tuple(episodes[place].key for place in places)
            answers = await self._stage.client.generate(
                GenerationRequest(prompt_ids=ids, sampling=self._stage.sampling, keys=keys)
            )
            if len(answers) != len(keys):
                raise RunError(f"the engine gave {len(answers)} completions where {len(keys)} were asked for")
            for place, answer in zip(places, answers, strict=True):
                completions[place] = answer
                episodes[place].waited_for_the_engine(time.perf_counter() - start)

        await _all([ask(ids, places) for ids, places in alike.items()])
        return completions

    async def _sample(
        self, episode: Episode, begun: GenerationRequest | Failure, completion: Completion | None
    ) -> Trajectory:
        """One trajectory; a sample whose environment fails is drawn again, with numbers of its own, while there is
        time.
        """
        failures: list[Failure] = []
        clock = asyncio.get_running_loop().time
        until = None if self._seconds is None else clock() + self._seconds
        attempt = _outcome(self._play(episode, begun, completion, until))
        while True:
            outcome = await attempt
            if isinstance(outcome, Trajectory):
                return evolve(outcome, failures=tuple(failures))
            failures.append(outcome)
            self.tally.count(outcome)
            late = until is not None and clock() >= until
            if late or len(failures) >= self._attempts or outcome.kind not in self._retried:
                return episode.failed(tuple(failures))
            episode = episode.again(attempt=episode.key.attempt + _RETRY)
            attempt = _outcome(self._play_again(episode, until))

    async def _play_again(self, episode: Episode, until: float | None) -> Trajectory:
        """From the beginning, within what is left of the sample's time."""

        async def first_turn() -> tuple[GenerationRequest | Failure, Completion | None]:
            begun = await _outcome(episode.begin())
            (completion,) = await self._first_turns([episode], [begun])
            return begun, completion

        try:
            begun, completion = await self._in_time(episode, first_turn(), until)
        except BaseException:
            await _outcome(episode.close())
            raise
        return await self._play(episode, begun, completion, until)

    async def _play(
        self, episode: Episode, begun: GenerationRequest | Failure, completion: Completion | None, until: float | None
    ) -> Trajectory:
        """To the end, in time, and closed."""
        if isinstance(begun, Failure):
            raise EpisodeError(begun)
        try:
            if completion is None:
                trajectory = episode.unplayed()
            else:
                trajectory = await self._in_time(episode, episode.play(completion), until)
        finally:
            closed = await _outcome(episode.close())
        if isinstance(closed, Failure):
            raise EpisodeError(closed)
        return trajectory

    async def _in_time(self, episode: Episode, work: Coroutine[Any, Any, T], until: float | None) -> T:
        try:
            async with asyncio.timeout_at(until):
                return await work
        except TimeoutError:
            limit = "environment.skyrl_gym.trajectory_timeout_seconds"
            raise EpisodeError(
                Failure(kind="timeout", reason=f"{episode.name} was not over after {self._seconds:g} s ({limit})")
            ) from None


async def _outcome(work: Coroutine[Any, Any, T]) -> T | Failure:
    """What it gives, or how the environment failed."""
    try:
        return await work
    except EpisodeError as error:
        return error.failure


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
