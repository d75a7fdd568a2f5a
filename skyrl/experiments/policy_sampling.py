"""The parts that sample from a policy: prompts, engines, environments, agents and the endpoint, without learners.

Evaluation and generation need nothing else (`standalone.py`); `ppo.py` adds the models that learn, and the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from skyrl.chats.tokenizer import ChatTokenizer
from skyrl.config import SkyRLTrainConfig
from skyrl.config.derive.engine_backends import backend_of
from skyrl.config.derive.every_kind import evaluates
from skyrl.config.derive.sizes import starts_engines
from skyrl.data.prompts import PromptDataset
from skyrl.endpoint.client_access import TOKEN_VARIABLE, Address, ClientAccess
from skyrl.endpoint.policy import ServedPolicy
from skyrl.errors import DataError
from skyrl.experiments.experiment import BaseExp
from skyrl.experiments.factories import (
    engine_changes,
    engine_makers,
    engine_restarts,
    in_flight_policy,
    longest_sequence,
    server_engines,
)
from skyrl.experiments.sampling import first_prompts, read_prompts
from skyrl.inference.engine import Completion, GenerationRequest, InferenceEngine
from skyrl.inference.pool.client import InferenceEngineClient
from skyrl.inference.pool.engine_proxy import EngineProxy
from skyrl.inference.pool.restarts import EngineRestarts
from skyrl.models.files.chat_templates import with_template
from skyrl.processes.credentials import api_key
from skyrl.rollout.agent_runner import AgentRunner
from skyrl.rollout.generator import SkyRLGymGenerator
from skyrl.runs.engine_changes import EngineChanges
from skyrl.runs.input_digests import combined_digest, files_below, judged_with
from skyrl.runs.inputs import check_data, notice, read_model_configs, report_unread_variables, sandbox_in_force
from skyrl.runs.recorded import RecordedRun
from skyrl.training.evaluation import Evaluation
from skyrl.tree import required

if TYPE_CHECKING:
    from skyrl.endpoint.http.server import Endpoint


class PolicySampling(BaseExp):
    """An experiment that samples from a policy and rewards its answers; a subclass defines how the samples are used."""

    cfg: SkyRLTrainConfig

    def __init__(self, cfg: SkyRLTrainConfig) -> None:
        """`cfg` is resolved and checked: `skyrl.config.compose` gives one."""
        super().__init__(cfg)
        self.endpoint: Endpoint | None = None
        """The HTTP endpoint, while the run serves one."""

    # The parts, cached once made. Override the method that makes one.

    @cached_property
    def train_dataset(self) -> PromptDataset:
        return self.get_train_dataset()

    @cached_property
    def eval_dataset(self) -> PromptDataset | None:
        return self.get_eval_dataset()

    @cached_property
    def client(self) -> InferenceEngineClient:
        return self.get_inference_client()

    @cached_property
    def engine_changes(self) -> EngineChanges | None:
        """Adds and drains engines on request; None if the run's engines cannot change."""
        return None if self.recorded else engine_changes(self.cfg, self.client, self.processes, self.folder.path)

    @cached_property
    def generator(self) -> SkyRLGymGenerator:
        return self.get_generator()

    @cached_property
    def recorded(self) -> RecordedRun | None:
        """The run whose samples this one is trained on, in place of engines; None for runs that sample."""
        source = self.cfg.trainer.rollouts_from
        return RecordedRun(Path(source).expanduser()) if source else None

    def input_digests(self) -> dict[str, str]:
        """Digests of what a resumed run reads again, with what sampling and judging read: validation rows, databases,
        tasks, a reward model.
        """
        digests, template = super().input_digests() | self.digests_beside_policy(), self.cfg.generator.chat_template
        if template.source == "file" and template.name_or_path is not None:
            file = Path(template.name_or_path).expanduser()
            digests |= combined_digest("generator.chat_template.name_or_path", [file])
        if self.recorded:
            recording = self.recorded.recording.folder
            return digests | combined_digest("trainer.rollouts_from", files_below(recording))
        if self.eval_dataset is not None:
            digests["data.val_data"] = self.eval_dataset.fingerprint
        datasets = [dataset for dataset in (self.train_dataset, self.eval_dataset) if dataset is not None]
        return digests | judged_with(self.cfg, datasets)

    def digests_beside_policy(self) -> dict[str, str]:
        """Digests of models beside the policy that a resumed run reads again: none."""
        return {}

    def get_tokenizer(self) -> ChatTokenizer:
        """The policy's tokenizer, with the chat template that is configured."""
        return with_template(super().get_tokenizer(), self.cfg.generator.chat_template)

    def get_train_dataset(self) -> PromptDataset:
        """The prompts to train on, or the first ones if they are streamed. Raises `DataError` if they do not fill one
        batch.
        """
        if self.cfg.data.streaming:
            return first_prompts(self.cfg, self.tokenizer)
        dataset = read_prompts(self.cfg, self.cfg.data.train_data, self.tokenizer, stored=True)
        batch = self.cfg.trainer.train_batch_size
        if len(dataset) < batch:
            raise DataError(
                f"trainer.train_batch_size = {batch} prompts, but the training data has {len(dataset)}"
                + (f" ({dataset.too_long} more are longer than trainer.max_prompt_length)" if dataset.too_long else "")
            )
        return dataset

    def get_eval_dataset(self) -> PromptDataset | None:
        """The prompts to evaluate on, or None if this run never evaluates."""
        if not evaluates(self.cfg.trainer):
            return None
        return read_prompts(self.cfg, self.cfg.data.val_data, self.tokenizer, stored=True)

    def get_inference_client(self) -> InferenceEngineClient:
        """Client of the engines that sample, each with its own copy of the weights."""
        engines = self.get_engines()
        return InferenceEngineClient(
            engines,
            self.tokenizer,
            self.model_path,
            self.cfg.trainer.policy.model.lora,
            self.cfg.generator.inference_engine,
            in_flight=in_flight_policy(self.cfg),
            restarts=self.get_restarts(engines),
        )

    def get_restarts(self, engines: Sequence[InferenceEngine]) -> EngineRestarts | None:
        """Starts engines during the run; None if they stay out of service once they died."""
        return engine_restarts(self.cfg, self.processes, engines)

    def get_engines(self) -> Sequence[InferenceEngine]:
        """The engines: processes of the run, or servers that run already, which get the policy's weights."""
        if not starts_engines(self.cfg):
            return server_engines(self.cfg, takes_weights=True, needed=longest_sequence(self.cfg))
        return self.start_engines(engine_makers(self.cfg))

    def start_engines(self, makers: Sequence[Callable[[], InferenceEngine]]) -> Sequence[InferenceEngine]:
        """The engines that `makers` make, in processes of the run."""
        return [EngineProxy(handle) for handle in self.processes.start("engine", makers).handles]

    def get_generator(self) -> SkyRLGymGenerator:
        """Generator of rewarded trajectories."""
        generator = SkyRLGymGenerator(
            self.model_path,
            self.cfg.trainer.policy.model.lora,
            self.cfg.generator,
            self.cfg.environment.skyrl_gym,
            self.client,
            self.tokenizer,
            user_env_class=self.cfg.environment.task,
            agent=self.get_agent(),
            seed=self.cfg.trainer.seed,
        )
        self.progress.details = generator.in_flight.__str__
        return generator

    def get_agent(self) -> AgentRunner | None:
        """The agent that plays the episodes; None if the run has none."""
        if not self.cfg.environment.agent.plays:
            return None
        environment, model = self.cfg.environment, served_policy(self.cfg).names[0]
        return AgentRunner(environment.agent, lambda: self.endpoint, model, environment.skyrl_gym.sandbox_tier)

    def get_evaluation(self) -> Evaluation | None:
        """Evaluation of the policy on other prompts, if this run evaluates."""
        if self.eval_dataset is None:
            return None
        trainer = self.cfg.trainer
        return Evaluation(
            self.eval_dataset.prompts,
            self.generator,
            self.cfg.generator,
            batch_size=trainer.eval_batch_size,
            dump_folder=self.exports / "dumped_evals" if trainer.dump_eval_results else None,
            decode=self.decode,
        )

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of these tokens, with special tokens."""
        text: str = self.tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text

    def check_inputs(self) -> Mapping[str, object] | None:
        """Check prompts and models. Returns the sandbox in which answers are judged, if any."""
        if self.recorded:  # it was checked when it was recorded
            return None
        return self.check_prompts(self.train_dataset, self.eval_dataset)

    def check_prompts(
        self, train: PromptDataset | None, evaluation: PromptDataset | None
    ) -> Mapping[str, object] | None:
        """Check these prompts together with the model. Returns the sandbox in which answers are judged, if any, for the
        run's record.
        """
        sandbox = sandbox_in_force(self.cfg, train, evaluation)
        check_data(self.cfg, train, evaluation)
        variables = self.cfg.generator.chat_template_kwargs
        report_unread_variables("generator.chat_template_kwargs", self.tokenizer, variables)
        read_model_configs(self.cfg, self.tokenizer, train, evaluation)
        return sandbox

    def open_endpoint(self) -> None:
        """Serve the policy over HTTP, if this run does."""
        address = None if self.recorded else self.get_endpoint_address()
        if address is not None:
            from skyrl.endpoint.http.server import Endpoint

            async def generate(request: GenerationRequest) -> tuple[Completion, ...]:
                return await self.client.generate(request)

            self.endpoint = Endpoint(served_policy(self.cfg), self.tokenizer, generate, address)
            self.resources.callback(self.endpoint.stop)
            if self.cfg.generator.inference_engine.enable_http_endpoint:
                notice(f"The policy is served at {self.endpoint.url}/v1")

    def get_endpoint_address(self) -> Address | None:
        """The address of the endpoint; None if this run serves no clients and no agents."""
        return address_of_clients(self.cfg) or self.address_of_agents

    @property
    def address_of_agents(self) -> Address | None:
        """An address of this machine that serves only the run's agents; None if no agent plays."""
        return Address(access=ClientAccess(open_to_clients=False)) if self.cfg.environment.agent.plays else None

    async def close_endpoint(self) -> None:
        """Stop serving the policy; called before the engines are closed."""
        if self.endpoint is not None:
            await self.endpoint.close()


def served_policy(run: SkyRLTrainConfig, *, name: str | None = None, adapters: Sequence[str] = ()) -> ServedPolicy:
    """Names and limits of the policy. `name` is another name of it, besides `served_model_name` and its path;
    `adapters` are the names of further adapters in the engines.

    At most twice the engines' `max_num_seqs` answers are sampled or wait; a request beyond that is refused with 429.
    """
    engine = run.generator.inference_engine
    path = required(run.trainer.policy.model.path, "trainer.policy.model.path")
    return ServedPolicy(
        names=(engine.served_model_name,) if engine.served_model_name else tuple(dict.fromkeys([name or path, path])),
        sampling=run.generator.sampling_params,
        max_model_len=longest_sequence(run),
        most_samples=2 * engine.max_num_seqs * engine.num_engines,
        template_arguments=run.generator.chat_template_kwargs,
        scores_prompts=backend_of(engine).scores_prompts,
        adapters=tuple(adapters),
    )


def address_of_clients(run: SkyRLTrainConfig) -> Address | None:
    """The address that clients of the run's endpoint use; None if the run has no endpoint for clients."""
    engine = run.generator.inference_engine
    if not engine.enable_http_endpoint:
        return None
    access = ClientAccess(token=api_key(TOKEN_VARIABLE))
    return Address(host=engine.http_endpoint_host, port=engine.http_endpoint_port, access=access)
