"""Prompts in, groups of rewarded trajectories out.

SkyRLGymGenerator --> SamplingSession (`sampling_session.py`: groups) --> Attempts (`attempts.py`: samples) --> Episode
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property

from skyrl.chats.tokenizer import ChatTokenizer
from skyrl.config import GeneratorConfig, SamplingParams, SkyRLGymConfig, SkyRLLoraConfig
from skyrl.inference.engine import SampleKey
from skyrl.inference.pool.client import InferenceEngineClient
from skyrl.models.files.chat_templates import with_template
from skyrl.processes.gather_or_cancel import gather_or_cancel
from skyrl.rollout.agent_runner import AgentRunner
from skyrl.rollout.attempts import FailureTally
from skyrl.rollout.chats import Chat, chat_of
from skyrl.rollout.env_calls import EnvCalls, SamplesInFlight
from skyrl.rollout.episode import EpisodeContext
from skyrl.rollout.sampling_session import SamplingSession
from skyrl.trajectory import Prompt, TrajectoryGroup


class SkyRLGymGenerator:
    """Samples n answers to each prompt with an inference engine and lets the prompt's environment reward each of them.

    Independent of training: it is built from the generator's own settings, and each call says what to sample.
    """

    def __init__(
        self,
        model_path: str,
        lora_config: SkyRLLoraConfig,
        generator_cfg: GeneratorConfig,
        skyrl_gym_cfg: SkyRLGymConfig,
        inference_engine_client: InferenceEngineClient,
        tokenizer: ChatTokenizer,
        *,
        user_env_class: str | None = None,
        agent: AgentRunner | None = None,
        seed: int = 0,
    ) -> None:
        """`user_env_class` is the task that the user's configuration names: the only import path that is ever
        followed. `agent` plays the episodes, if given.
        """
        self._agent = agent
        self.model_path = model_path
        self.lora_config = lora_config
        self._config = generator_cfg
        self._gym = skyrl_gym_cfg
        self._client = inference_engine_client
        self._tokenizer = with_template(tokenizer, generator_cfg.chat_template)
        self._seed = seed
        self._user_env_class = user_env_class
        self.in_flight = SamplesInFlight()
        """Samples that are being drawn, of all calls together."""

    async def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        sampling: SamplingParams,
        samples_per_prompt: int,
        weight_version: int,
        purpose: str = "train",
        attempt: int = 0,
        tally: FailureTally | None = None,
    ) -> tuple[TrajectoryGroup, ...]:
        """One group for each prompt, in order.

        The seed of every sample depends on `purpose` (`train`, `eval` or `baseline`), `weight_version`, `attempt`
        (which distinguishes several draws by the same weights) and how often its prompt occurred before in `prompts`.

        Calls that share a `tally` count their failures together; with None, each call counts its own. Raises
        `RewardError` if environments fail more often than `max_failed_share` allows, another `RunError` if the engine
        fails.
        """
        session = self.session(
            sampling=sampling,
            samples_per_prompt=samples_per_prompt,
            purpose=purpose,
            samples=len(prompts) * samples_per_prompt,
            together=len(prompts) if self._config.batched else None,
            tally=tally,
        )
        for prompt in prompts:
            session.task_of(prompt)  # a wrong one is refused before anything is sampled
        seen: Counter[str] = Counter()
        groups = []
        for prompt in prompts:
            occurrence = seen[prompt.id]
            seen[prompt.id] += 1
            groups.append(session.group(prompt, weight_version=weight_version, attempt=attempt, occurrence=occurrence))
        return tuple(await gather_or_cancel(groups))

    def session(
        self,
        *,
        sampling: SamplingParams,
        samples_per_prompt: int,
        samples: int,
        purpose: str = "train",
        together: int | None = None,
        tally: FailureTally | None = None,
    ) -> SamplingSession:
        """A session for groups that are sampled one by one and share limits on trajectories, environments and failures.

        Failures are counted over `samples` samples, or in a `tally` of several sessions. `together` is the number of
        groups that are requested at once; none of them is judged before all are sampled.
        """
        context = EpisodeContext(
            config=self._config,
            sampling=sampling,
            client=self._client,
            tokenizer=self._tokenizer,
            chat=lambda: self._chat,
            call=self._env_calls,
            agent=self._agent,
        )
        key = SampleKey(run_seed=self._seed, weight_version=0, prompt_id="", sample_index=0, purpose=purpose)
        return SamplingSession(
            context,
            self._gym,
            tally or self.tally(samples),
            key,
            samples_per_prompt=samples_per_prompt,
            user_env_class=self._user_env_class,
            together=together,
            in_flight=self.in_flight,
        )

    def tally(self, samples: int) -> FailureTally:
        """A tally of failures for the given number of samples, with the limits of `environment.skyrl_gym`."""
        return FailureTally(samples, self._gym.max_failed_share, attempts=self._gym.max_attempts)

    @cached_property
    def _env_calls(self) -> EnvCalls:
        """Calls of environments in training, evaluation and baselines together: `max_env_workers` is a limit of the
        run.
        """
        return EnvCalls(self._gym.max_env_workers, self._gym.step_timeout_seconds, self.in_flight)

    @cached_property
    def _chat(self) -> Chat:
        return chat_of(self._config, self._tokenizer)
