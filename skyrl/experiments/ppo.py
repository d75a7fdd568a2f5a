"""A training run, put together: each collaborator is built from its own part of the configuration.

Subclass `BasePPOExp` and override one `get_...` to bring your own collaborator; override `get_config_cls` for a
configuration with fields of your own.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

import cattrs
import torch

from skyrl.checkpoint.store import Checkpoint, CheckpointStore
from skyrl.config import SkyRLTrainConfig
from skyrl.data.cursor import PromptCursor
from skyrl.data.prompts import PromptDataset, load_prompts
from skyrl.envs.registry import find_task
from skyrl.errors import DataError
from skyrl.experiments.claims import Claim
from skyrl.experiments.resume import find_start
from skyrl.experiments.run_folder import RunFolder
from skyrl.inference.client import InferenceEngineClient
from skyrl.inference.torch_engine import TorchEngine
from skyrl.learners.fsdp import PolicyWorker, RefWorker, required_device
from skyrl.models.loading import load_causal_lm, load_tokenizer, max_positions, refuse_small_vocabulary, save_pretrained
from skyrl.rollout.batches import Rollouts, SynchronousRollouts
from skyrl.rollout.generator import SkyRLGymGenerator
from skyrl.tracking.console import Console
from skyrl.tracking.jsonlines import MetricsFile, sample_records
from skyrl.tracking.timing import Clock, timed
from skyrl.tracking.tracker import Tracker, Trackers
from skyrl.training.advantage import advantage_estimator
from skyrl.training.evaluation import Evaluation
from skyrl.training.objective import policy_objective
from skyrl.training.trainer import PPOTrainer
from skyrl.trajectory import TrajectoryGroup
from skyrl.tree import fingerprint, required
from skyrl.weight_sync.publish import WeightSync


class BasePPOExp:
    """One run of policy-gradient training in this process.

    Each collaborator is made by its `get_...` method when it is first needed, and then kept.
    """

    def __init__(self, cfg: SkyRLTrainConfig) -> None:
        """`cfg` is resolved and checked: `skyrl.config.compose` gives one."""
        self.cfg = cfg
        self.clock = Clock()
        self.folder = RunFolder(Path(required(cfg.trainer.run_path, "trainer.run_path")).expanduser())
        self.checkpoints = CheckpointStore(Path(cfg.trainer.ckpt_path).expanduser(), cfg.trainer.max_ckpts_to_keep)

    @classmethod
    def get_config_cls(cls) -> type[SkyRLTrainConfig]:
        """The root class that files and arguments are read into."""
        return SkyRLTrainConfig

    # What a run is made of, kept once made. Override the method that makes it.

    @cached_property
    def tokenizer(self) -> Any:
        return self.get_tokenizer()

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
    def generator(self) -> SkyRLGymGenerator:
        return self.get_generator()

    @cached_property
    def policy(self) -> PolicyWorker:
        return self.get_policy()

    @cached_property
    def total_steps(self) -> int:
        """Batches in all epochs, at most `max_training_steps`."""
        trainer = self.cfg.trainer
        steps = trainer.epochs * (len(self.train_dataset) // trainer.train_batch_size)
        return steps if trainer.max_training_steps is None else min(steps, trainer.max_training_steps)

    def get_tokenizer(self) -> Any:
        """The policy's tokenizer."""
        return load_tokenizer(self._model_path, use_fast=not self.cfg.trainer.disable_fast_tokenizer)

    def get_train_dataset(self) -> PromptDataset:
        """The prompts to train on. Raises `DataError` if they do not fill one batch."""
        dataset = self._load(self.cfg.data.train_data)
        batch = self.cfg.trainer.train_batch_size
        if len(dataset) < batch:
            raise DataError(
                f"trainer.train_batch_size = {batch} prompts, but the training data has {len(dataset)}"
                + (f" ({dataset.too_long} more are longer than trainer.max_prompt_length)" if dataset.too_long else "")
            )
        return dataset

    def get_eval_dataset(self) -> PromptDataset | None:
        """The prompts to evaluate on, or None if this run never evaluates."""
        trainer = self.cfg.trainer
        wanted = trainer.eval_before_train or trainer.eval_interval > 0
        return self._load(self.cfg.data.val_data) if wanted else None

    def get_inference_client(self) -> InferenceEngineClient:
        """The engines that sample: one, embedded in this process, with weights of its own."""
        trainer, config = self.cfg.trainer, self.cfg.generator.inference_engine
        model = load_causal_lm(
            self._model_path,
            dtype=getattr(torch, required(trainer.compute_dtype, "trainer.compute_dtype")),
            attention=required(trainer.attention, "trainer.attention"),
            device=torch.device(required_device(trainer)),
        )
        refuse_small_vocabulary(model, self.tokenizer, self._model_path)
        engine = TorchEngine(
            model,
            self.tokenizer,
            max_num_seqs=config.max_num_seqs,
            deterministic=required(config.deterministic, "generator.inference_engine.deterministic"),
        )
        return InferenceEngineClient([engine], self.tokenizer, self._model_path, trainer.policy.model.lora, config)

    def get_generator(self) -> SkyRLGymGenerator:
        """What turns prompts into rewarded trajectories."""
        return SkyRLGymGenerator(
            self._model_path,
            self.cfg.trainer.policy.model.lora,
            self.cfg.generator,
            self.cfg.environment.skyrl_gym,
            self.client,
            self.tokenizer,
            user_env_class=self.cfg.environment.env_class,
            seed=self.cfg.trainer.seed,
        )

    def get_policy(self) -> PolicyWorker:
        """The model that learns."""
        trainer = self.cfg.trainer
        updates = trainer.update_epochs_per_batch * (trainer.train_batch_size // trainer.policy_mini_batch_size)
        return PolicyWorker(trainer, policy_objective(trainer.algorithm), self.total_steps * updates)

    def get_reference(self) -> RefWorker | None:
        """The model that the KL term measures the distance from, if there is a KL term."""
        if not self.cfg.trainer.algorithm.use_kl_loss:
            return None
        reference = RefWorker(self.cfg.trainer)
        refuse_small_vocabulary(reference.model, self.tokenizer, str(self.cfg.trainer.ref.model.path))
        return reference

    def get_rollouts(self) -> Rollouts:
        """What `next_batch` is asked of."""
        trainer = self.cfg.trainer
        cursor = PromptCursor(self.train_dataset.prompts, trainer.train_batch_size, trainer.seed)
        return SynchronousRollouts(cursor, self.generator, self.cfg.generator)

    def get_evaluation(self) -> Evaluation | None:
        """What measures the policy on other prompts, if this run evaluates."""
        if self.eval_dataset is None:
            return None
        trainer = self.cfg.trainer
        return Evaluation(
            self.eval_dataset.prompts,
            self.generator,
            self.cfg.generator,
            batch_size=trainer.eval_batch_size,
            dump_folder=self._exports / "dumped_evals" if trainer.dump_eval_results else None,
            decode=self._decode,
        )

    def get_tracker(self, first_step: int) -> Tracker:
        """Where metrics go: the run folder and the console."""
        return Trackers([MetricsFile(self.folder.metrics), Console(self.total_steps, first_step)])

    def get_trainer(self, tracker: Tracker) -> PPOTrainer:
        """The loop with its collaborators, each timed."""
        reference = self.get_reference()
        trainer = PPOTrainer(
            self.cfg.trainer,
            rollouts=timed(self.get_rollouts(), self.clock, next_batch="generate"),
            policy=timed(self.policy, self.clock, score="policy_logprobs", update="policy_train"),
            reference=reference and timed(reference, self.clock, score="ref_logprobs"),
            weights=timed(WeightSync(self.policy, self.client), self.clock, publish="sync_weights"),
            estimate=advantage_estimator(self.cfg.trainer.algorithm),
            evaluation=self.get_evaluation(),
            tracker=tracker,
            clock=self.clock,
            total_steps=self.total_steps,
            save=lambda step: self._save(trainer, step),
            export=lambda step: self._export(self._exports / f"global_step_{step}" / "policy"),
            on_samples=self._record_samples,
        )
        return trainer

    def run(self) -> bool:
        """Train to the end; False if an earlier session had already done so. What was saved stays, whatever happens."""
        self._look_at_the_data()
        with ExitStack() as held:
            claims = self._claims()
            for claim in claims:
                claim.take()
                held.callback(claim.release)
            checkpoint = find_start(self.cfg, self.checkpoints, self.folder)
            for claim in claims:
                claim.sign()
                held.callback(self._keep_or_unsign, claim)
            finished = checkpoint is not None and checkpoint.step >= self.total_steps
            if not finished:
                self._train(checkpoint)
            elif checkpoint is not None and not self.folder.model.exists():  # stopped just before the end
                self.policy.load_state(checkpoint.tensors, checkpoint.state["policy"])
            if not self.folder.model.exists():
                self._finish()
            return not finished

    def _claims(self) -> tuple[Claim, ...]:
        """Every folder that this run writes into, once."""
        fields = {
            self._exports: "trainer.export_path",
            self.checkpoints.folder: "trainer.ckpt_path",
            self.folder.path: "trainer.run_path",
        }
        return tuple(Claim(path, field, self.cfg) for path, field in fields.items())

    def _keep_or_unsign(self, claim: Claim) -> None:
        """A run that failed before it kept anything leaves its folders free."""
        if not self.checkpoints.steps() and not self.folder.model.exists():
            claim.unsign()

    def _train(self, checkpoint: Checkpoint | None) -> None:
        trainer = self.get_trainer(self.get_tracker(checkpoint.step if checkpoint else 0))
        if checkpoint is not None:
            _say(f"Going on after step {checkpoint.step}, from a checkpoint")
            self.policy.load_state(checkpoint.tensors, checkpoint.state["policy"])
            trainer.load_state(dict(checkpoint.state["trainer"]))
        shutil.rmtree(self.folder.model, ignore_errors=True)  # of a run that is now made longer
        self.folder.forget_after(checkpoint.step if checkpoint else -1)
        asyncio.run(self._loop(trainer))

    def _finish(self) -> None:
        """What a run leaves: the model, and a picture of how it came about."""
        self._export(self.folder.model)
        self.folder.draw_curve(f"{self.cfg.trainer.project_name} / {self.cfg.trainer.run_name}")

    async def _loop(self, trainer: PPOTrainer) -> None:
        try:
            await trainer.train()
        finally:
            trainer.tracker.close()
            await self.client.close()

    def _save(self, trainer: PPOTrainer, step: int) -> None:
        tensors, numbers = self.policy.state()
        self.checkpoints.save(
            Checkpoint(
                step=step,
                tensors=tensors,
                state={"policy": numbers, "trainer": trainer.state()},
                config=cattrs.unstructure(self.cfg),
                fingerprint=fingerprint(self.cfg),
            )
        )

    def _look_at_the_data(self) -> None:
        """Read it all before anything is made: what is wrong with it is told now, and what is left out is said."""
        for name, dataset in (("training", self.train_dataset), ("evaluation", self.eval_dataset)):
            if dataset is None:
                continue
            for env_class in {prompt.env_class for prompt in dataset.prompts}:
                find_task(env_class, self.cfg.environment.env_class)
            if dataset.too_long:
                _say(f"{dataset.too_long} {name} prompts are longer than trainer.max_prompt_length and left out")
        self._refuse_what_the_model_cannot_hold()
        rest = len(self.train_dataset) % self.cfg.trainer.train_batch_size
        if rest:
            _say(f"{rest} training prompts, others in each epoch, do not fill a batch and are left out")

    def _refuse_what_the_model_cannot_hold(self) -> None:
        """The longest prompt and the longest answer together need as many positions as the model has."""
        positions = max_positions(self._model_path)
        generator = self.cfg.generator
        sampled = ((self.train_dataset, generator.sampling_params), (self.eval_dataset, generator.eval_sampling_params))
        for dataset, sampling in sampled:
            if dataset is None or sampling is None or positions is None:
                continue
            longest = max(len(prompt.token_ids) for prompt in dataset.prompts)
            if longest + sampling.max_generate_length > positions:
                raise DataError(
                    f"the longest prompt ({longest} tokens) and max_generate_length = {sampling.max_generate_length} "
                    f"do not fit into the {positions} positions of the model: lower max_generate_length, or leave long "
                    "prompts out with trainer.max_prompt_length"
                )

    def _export(self, folder: Path) -> None:
        save_pretrained(dict(self.policy.weights()), self.policy.model, self.tokenizer, folder)

    def _record_samples(self, step: int, groups: Sequence[TrajectoryGroup]) -> None:
        for record in sample_records(step, groups, self._decode):
            self.folder.trajectories.append(record)

    def _decode(self, token_ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text

    def _load(self, sources: Sequence[str]) -> PromptDataset:
        return load_prompts(
            sources,
            self.tokenizer,
            env_class=self.cfg.environment.env_class,
            max_prompt_length=self.cfg.trainer.max_prompt_length,
            chat_template_kwargs=self.cfg.generator.chat_template_kwargs,
        )

    @property
    def _model_path(self) -> str:
        return required(self.cfg.trainer.policy.model.path, "trainer.policy.model.path")

    @property
    def _exports(self) -> Path:
        return Path(self.cfg.trainer.export_path).expanduser()


def _say(text: str) -> None:
    print(text, file=sys.stderr)
