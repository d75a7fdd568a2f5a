"""Training runs that learn from rows: supervised fine-tuning, and reward models from pairs of rows.

As in `ppo.py`, each part is made by its `get_...` method when it is first needed, and then kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

from attrs import evolve
from torch import Tensor

from skyrl.batch import TEACHER_HIDDEN, TEACHER_IDS, TEACHER_LOGPROBS, TrainingBatch
from skyrl.chats.tokenizer import ChatTokenizer
from skyrl.config import RewardModelConfig, SFTConfig, SupervisedConfig
from skyrl.config.checks.supervised_checks import evaluation_names
from skyrl.config.derive.model_overrides import learner_overrides
from skyrl.config.derive.supervised_rules import MODEL
from skyrl.config.loading.kinds import kind_of
from skyrl.config.settings.distillation import SFTDistillationConfig
from skyrl.config.settings.models import ModelConfig
from skyrl.config.settings.samplers import SamplerConfig
from skyrl.data.cursor import PromptCursor, StreamCursor, batches, batches_before, ends_before, permutation
from skyrl.data.order import Mixed, Order, Sequential, Shuffled
from skyrl.data.row_store import row_key
from skyrl.data.row_streams import EXAMINED, RowStream, parts_of, versions
from skyrl.data.samplers import Sampler
from skyrl.data.supervised_rows import RowReader, TokenizedRows, load_preferences, load_supervised, reading_settings
from skyrl.errors import DataError
from skyrl.experiments.experiment import BaseExp
from skyrl.experiments.exports import chat_tokenizer, export_of, new_turn_end
from skyrl.experiments.factories import close_teachers, connect_teachers, served_teacher
from skyrl.experiments.full_length import (
    supervised_fit_report,
    supervised_without_traces,
    synthetic_pairs,
    synthetic_sequences,
)
from skyrl.experiments.sampling import sampler_of
from skyrl.learners.budget import TokenBudget
from skyrl.learners.ranks import Ranks
from skyrl.learners.workers.group import LearnerGroup, ScorerGroup
from skyrl.learners.workers.learning_worker import LearningWorker, Objective
from skyrl.learners.workers.objectives import BradleyTerry, CrossEntropy
from skyrl.learners.workers.roles import RewardModelWorker, SFTTeacherWorker, SFTWorker
from skyrl.models.files.loading import load_tokenizer, max_positions, refuse_small_vocabulary
from skyrl.planning.replicas import Replicas, replicas
from skyrl.runs.input_digests import combined_digest, model_digests
from skyrl.runs.inputs import notice, refuse_other_tokens, report_unread_variables
from skyrl.tracking.source_labels import source_labels
from skyrl.tracking.tracker import Tracker
from skyrl.training.collate import collate_pairs, collate_supervised
from skyrl.training.describe import Metrics
from skyrl.training.loop import Hooks, TrainingLoop
from skyrl.training.middleware import LayeredLearner, ProfiledSteps, in_context, layered, run_before
from skyrl.training.supervised import (
    RowPosition,
    Sums,
    SupervisedEvaluation,
    SupervisedTrainer,
    likelihood,
    preferences,
)
from skyrl.training.teacher import ServedTeacher

SCORED_AT_A_TIME = 64
"""Minimum number of rows in a batch of an evaluation; micro-batches bound what is computed at a time."""

UNBOUNDED = 1 << 20
"""Maximum number of tokens in a row if neither the configuration nor the model has a bound."""


class SupervisedExp(BaseExp):
    """Experiment of supervised runs."""

    cfg: SupervisedConfig
    worker: ClassVar[Callable[..., LearningWorker]]
    """The role of the model."""

    learner_group: ClassVar[type[LearnerGroup[Any]]] = LearnerGroup
    """All its ranks."""

    def __init__(self, cfg: SupervisedConfig) -> None:
        """`cfg` is resolved and checked: `skyrl.config.compose` gives one."""
        super().__init__(supervised_without_traces(cfg) if cfg.num_dummy_steps else cfg)

    @cached_property
    def train_dataset(self) -> TokenizedRows[Any]:
        """The rows to train on, the first ones if they are streamed, or made-up ones if configured. Raises `DataError`
        if they do not fill one batch, unless batches may be short.
        """
        if self.cfg.num_dummy_steps:
            return self.synthetic_rows(len(self.tokenizer))
        if self.cfg.streaming:
            stream = RowStream(parts_of(self.cfg.train_datasets), buffer=1, seed=None)
            first: TokenizedRows[Any] = self.reader(self.cfg.train_datasets).first(stream, EXAMINED)
            return first
        rows = self.load(self.cfg.train_datasets)
        if len(rows) < self.cfg.batch_size and self.cfg.epoch_tail != "short":
            raise DataError(f"batch_size = {self.cfg.batch_size} rows, but the training data has {len(rows)}")
        return rows

    @cached_property
    def eval_datasets(self) -> dict[str, TokenizedRows[Any]]:
        """The rows to evaluate on, by the name of their set."""
        names = evaluation_names(self.cfg)
        labels = source_labels(names)
        named = zip(names, self.cfg.eval_datasets, strict=True)
        return {labels[name]: self.load_evaluated((source,)) for name, source in named}

    @cached_property
    def max_length(self) -> int:
        """Maximum length of a row, in tokens. Raises `DataError` if it exceeds the positions of the model, and for
        made-up rows without any bound.
        """
        positions = max_positions(self.model_path, learner_overrides(self.cfg, self.cfg))
        if self.cfg.max_length is not None and positions is not None and self.cfg.max_length > positions:
            raise DataError(f"max_length = {self.cfg.max_length}, but the model has {positions} positions")
        if self.cfg.num_dummy_steps and self.cfg.max_length is positions is None:
            raise DataError("num_dummy_steps: the model has no maximum length; set max_length, the longest row")
        return self.cfg.max_length or positions or UNBOUNDED

    @cached_property
    def learner(self) -> LearnerGroup[LearningWorker]:
        """The model, on all its ranks."""
        return self.get_learner()

    @property
    def learners(self) -> dict[str, LearnerGroup[LearningWorker]]:
        """The learner, keyed by its name in checkpoints."""
        return {self.role: self.learner}

    @cached_property
    def total_steps(self) -> int:
        """Number of batches in all epochs, at most `num_steps` and with at most `max_training_samples` rows, or the
        number of made-up steps if these are configured.
        """
        if self.cfg.num_dummy_steps:
            return self.cfg.num_dummy_steps
        cfg = self.cfg
        if cfg.streaming:
            samples = cfg.max_training_samples
            most = [cfg.num_steps, None if samples is None else samples // cfg.batch_size]
            return min(limit for limit in most if limit is not None)
        rows = len(self.train_dataset)
        steps, _ = batches(rows, cfg.batch_size, cfg.num_epochs, cfg.epoch_tail)
        limits = [cfg.num_steps]
        if cfg.max_training_samples is not None:
            limits.append(batches_before(cfg.max_training_samples, rows, cfg.batch_size, cfg.epoch_tail))
        return min([steps, *(limit for limit in limits if limit is not None)])

    def input_digests(self) -> dict[str, str]:
        """Digests of what a resumed run reads again, with the chat template and the rows to evaluate on."""
        template, field = self.cfg.chat_template, "chat_template.name_or_path"
        is_file = template.source == "file" and template.name_or_path is not None
        result = super().input_digests()
        result |= combined_digest(field, [Path(str(template.name_or_path)).expanduser()]) if is_file else {}
        return result | {f"eval_datasets: {name}": rows.fingerprint for name, rows in self.eval_datasets.items()}

    def load(self, sources: tuple[str, ...]) -> TokenizedRows[Any]:
        """Rows of this kind of run."""
        raise TypeError(f"{type(self).__name__} does not define load()")

    def load_evaluated(self, sources: tuple[str, ...]) -> TokenizedRows[Any]:
        """Rows to evaluate on. Here they are read as those to train on."""
        return self.load(sources)

    def reader(self, sources: tuple[str, ...]) -> RowReader[Any]:
        """Reads rows of this kind of run one by one."""
        reader: RowReader[Any] = kind_of(self.cfg).row_reader()(sources, self.tokenizer, self.cfg, self.max_length)
        return reader

    def synthetic_rows(self, vocabulary: int) -> TokenizedRows[Any]:
        """One batch of rows of the maximum length, with tokens below `vocabulary`."""
        raise TypeError(f"{type(self).__name__} does not define synthetic_rows()")

    def get_learner(self) -> LearnerGroup[LearningWorker]:
        """The model that learns. It is placed as the policy of a run is: there is no other model."""
        makers = [partial(self.worker, self.cfg, self.total_steps, ranks=ranks) for ranks in self.ranks()]
        ranks = self.processes.start("policy", makers)
        rows = self.cfg.rows_of_an_item
        return self.learner_group(ranks, self.budget(), replicas=self.replicas, rows_of_an_item=rows)

    def get_objective(self) -> Objective:
        """Objective that the model minimizes."""
        raise TypeError(f"{type(self).__name__} does not define get_objective()")

    def collate(self, rows: Sequence[Any]) -> TrainingBatch:
        """Combine rows into a batch."""
        raise TypeError(f"{type(self).__name__} does not define collate()")

    async def complete(self, batch: TrainingBatch) -> TrainingBatch:
        """The batch with what other models compute. Here there are none."""
        return batch

    async def complete_evaluated(self, batch: TrainingBatch) -> TrainingBatch:
        """`complete` for a batch that is evaluated."""
        return await self.complete(batch)

    async def refresh_reference(self) -> None:
        """Bring a reference that moves up to the policy. Here there is none."""

    def measure(self, scores: Tensor, batch: TrainingBatch) -> Sums:
        """Sums that an evaluation takes from the scores of a batch."""
        raise TypeError(f"{type(self).__name__} does not define measure()")

    def get_evaluation(self) -> SupervisedEvaluation | None:
        """Evaluation of the model on other rows, if there are any."""
        if not self.eval_datasets:
            return None
        sets = {name: dataset.rows for name, dataset in self.eval_datasets.items()}
        size = max(self.cfg.batch_size, SCORED_AT_A_TIME)
        return SupervisedEvaluation(sets, self.collate, self.measure, batch_size=size, complete=self.complete_evaluated)

    def get_order(self) -> Order:
        """Order of the rows in an epoch."""
        cfg, rows = self.cfg, self.train_dataset
        if cfg.train_dataset_weights is not None:
            return Mixed(rows.sizes, cfg.train_dataset_weights, cfg.seed)
        return Sequential(len(rows)) if cfg.sampler == "sequential" else Shuffled(len(rows), cfg.seed)

    def get_sampler(self) -> Sampler:
        """Choice of the rows of each batch."""
        cfg, rows = self.cfg, self.train_dataset
        return sampler_of(
            SamplerConfig() if cfg.num_dummy_steps else cfg.curriculum,
            permutation(self.get_order(), cfg.batch_size, cfg.epoch_tail),
            rows=rows.rows,
            sizes=rows.sizes,
            batch=cfg.batch_size,
            seed=cfg.seed,
        )

    def get_cursor(self) -> PromptCursor[Any] | StreamCursor[Any]:
        """The position in the rows, and the batches that follow from it."""
        cfg = self.cfg
        if cfg.streaming and not cfg.num_dummy_steps:
            seed = None if cfg.sampler == "sequential" else cfg.seed
            stream = RowStream(parts_of(cfg.train_datasets), buffer=cfg.shuffle_buffer_size, seed=seed)
            drawn = {"longest": self.max_length, "buffer": cfg.shuffle_buffer_size, "seed": seed}
            read = {**reading_settings(cfg), **drawn, "versions": versions(cfg.train_datasets)}
            key = row_key((), self.tokenizer, read)
            return StreamCursor(stream, self.reader(cfg.train_datasets).streamed, cfg.batch_size, key)
        rows = self.train_dataset
        return PromptCursor(
            rows.rows,
            cfg.batch_size,
            cfg.seed,
            order=self.get_order(),
            tail=cfg.epoch_tail,
            fingerprint=rows.fingerprint,
            sampler=self.get_sampler(),
        )

    def get_loop(self, tracker: Tracker) -> TrainingLoop:
        """The training loop: a batch of rows, an optimizer step, and the hooks before and after it."""
        cfg, cursor, evaluation = self.cfg, self.get_cursor(), self.get_evaluation()
        profiled = ProfiledSteps(cfg.profile_steps, self.folder.profile)

        async def step_begins() -> None:
            profiled.begins(trainer.version + 1)

        measured = in_context(partial(self.clock.measure, "update"))
        learner = LayeredLearner(
            score=self.learner.score,
            forward_backward=layered(
                self.learner.forward_backward, profiled.around(self.learner), measured, run_before(step_begins)
            ),
            optimizer_step=layered(self.learner.optimizer_step, measured),
        )
        position = RowPosition(cursor, self.total_steps, cfg)
        trainer = SupervisedTrainer(position, self.collate, learner, self.get_objective(), self.complete)

        async def evaluate(version: int) -> Metrics:
            return {} if evaluation is None else await evaluation.run(learner)

        return TrainingLoop(
            cfg,
            trainer,
            Hooks(
                evaluate=evaluate,
                export=lambda step: self.export(self.exports / f"global_step_{step}" / "model"),
                alarms=self.get_alarms(),
                refresh_reference=self.refresh_reference,
                report_alarm=self.report_alarm,
                callbacks=self.callbacks,
            ),
            total_steps=self.total_steps,
            tracker=tracker,
            clock=self.clock,
            shutdown=self.shutdown,
            checkpoints=self.saving,
        )

    def get_tokenizer(self) -> ChatTokenizer:
        """The model's tokenizer, with the configured chat template."""
        return chat_tokenizer(self.cfg)

    def get_export(self, folder: Path) -> Callable[[Iterator[tuple[str, Tensor]]], None]:
        """Function that stores the gathered weights in `folder`, with the files that generation needs beside them."""
        return export_of(self.cfg, folder)

    @cached_property
    def turn_end(self) -> int | None:
        """A token that ends the turns that are learned, and at which the model's generation does not stop yet."""
        return new_turn_end(self.cfg, self.tokenizer)

    @property
    def products(self) -> tuple[Path, ...]:
        """The trained model and its adapter; nothing for made-up rows."""
        return () if self.cfg.num_dummy_steps else super().products

    async def finish(self) -> None:
        """Write the trained model; for made-up rows, report that they fit."""
        if self.cfg.num_dummy_steps:
            notice(supervised_fit_report(self.cfg, self.max_length, self.folder.metrics.read()))
            return
        await super().finish()

    def check_inputs(self) -> None:
        """Check that the model knows every token; report rows that are left out. Raises `DataError`, `ModelError`."""
        refuse_small_vocabulary(self.model_path, self.tokenizer)
        report_unread_variables("chat_template_kwargs", self.tokenizer, self.cfg.chat_template_kwargs)
        for name, dataset in {"training": self.train_dataset, **self.eval_datasets}.items():
            tally = dataset.tally
            if tally.too_long:
                notice(f"{tally.too_long} {name} rows are longer than {self.max_length} tokens and left out")
            if tally.cut:
                notice(f"{tally.cut} {name} rows are longer than {self.max_length} tokens, and were cut")
            for sentence in tally.blanks.sentences(f"{name} rows"):
                notice(sentence)
            if tally.behind_other_headers:
                notice(
                    f"{tally.behind_other_headers} {name} rows have no thoughts, although the chat template's "
                    "header of an answer opens one: they are trained behind a different header than sampling uses (see "
                    "chat_template_kwargs, such as enable_thinking = false)"
                )
            if tally.bad_rows:
                notice(f"{len(tally.bad_rows)} {name} rows are bad and left out; the first: {tally.bad_rows[0]}")
        self.get_sampler()  # one that cannot be made is refused before anything starts
        match self.train_dataset.tally.turn_end:  # whether generation with the trained model stops there
            case (end, None):
                notice(
                    f"the chat template ends turns with the text {end!r}, which is not a token: stop sampling at this "
                    "text"
                )
            case (end, token) if token == self.turn_end:
                notice(
                    f"the chat template ends turns with {end!r} (token {token}), at which the model's generation does "
                    "not stop: the exported generation_config.json gets it as one more eos_token_id"
                )
        if self.cfg.streaming:
            return
        cfg, rows = self.cfg, len(self.train_dataset)
        _, left_out = batches(rows, cfg.batch_size, cfg.num_epochs, cfg.epoch_tail)
        rest = rows % cfg.batch_size
        if rest and cfg.epoch_tail == "drop":
            notice(f"{rest} training rows do not fill a batch and are left out of each epoch (epoch_tail)")
        elif left_out:
            notice(f"{left_out} training rows, the last ones of the last epoch, do not fill a batch and are left out")
        epochs = "num_epochs", cfg.num_epochs
        if text := ends_before(cfg.num_steps, rows, cfg.batch_size, epochs, cfg.epoch_tail):
            notice(f"warning: num_steps: {text}")

    @property
    def replicas(self) -> Replicas:
        """Which ranks of the model compute on the same rows."""
        degrees = MODEL.degrees(self.cfg)
        return replicas(MODEL.ranks(self.cfg), inner=degrees.inner, stages=degrees.pipeline)

    def ranks(self) -> tuple[Ranks, ...]:
        """The ranks of the model."""
        return self.ranks_of(self.role, MODEL.ranks(self.cfg), self.replicas)

    def budget(self) -> TokenBudget:
        """Bound of micro-batches in tokens; rows of a group stay together."""
        limit = self.cfg.max_tokens_per_microbatch
        return TokenBudget(tokens=limit if limit > 0 else None, keep_groups=True)


class SFTExp(SupervisedExp):
    """Supervised fine-tuning, beside a teacher if there is one."""

    cfg: SFTConfig
    worker = SFTWorker

    @cached_property
    def teacher(self) -> ScorerGroup[SFTTeacherWorker] | ServedTeacher | None:
        """The teacher that scores rows: a frozen model on the ranks of the run's model, or one behind a server."""
        if self.served_teachers:
            return self.served_teachers[0]
        if self.cfg.distillation.teacher_path is None:
            return None
        ranks = self.ranks_of("teacher", MODEL.ranks(self.cfg), self.replicas)
        started = self.processes.start("teacher", [partial(SFTTeacherWorker, self.cfg, ranks=rank) for rank in ranks])
        return ScorerGroup(started, self.budget(), replicas=self.replicas)

    @cached_property
    def served_teachers(self) -> tuple[ServedTeacher, ...]:
        """The teacher, if it is one behind a server."""
        endpoint = self.cfg.distillation.endpoint
        return () if endpoint.url is None else (served_teacher(endpoint, endpoint.url),)

    def load(self, sources: tuple[str, ...]) -> TokenizedRows[Any]:
        return load_supervised(sources, self.tokenizer, self.cfg, self.max_length)

    def load_evaluated(self, sources: tuple[str, ...]) -> TokenizedRows[Any]:
        """Rows to evaluate on, whose likelihood is measured, without a teacher."""
        cfg = evolve(self.cfg, distillation=SFTDistillationConfig())
        return load_supervised(sources, self.tokenizer, cfg, self.max_length)

    def synthetic_rows(self, vocabulary: int) -> TokenizedRows[Any]:
        return synthetic_sequences(self.cfg, self.max_length, vocabulary)

    def collate(self, rows: Sequence[Any]) -> TrainingBatch:
        return collate_supervised(rows)

    def check_inputs(self) -> None:
        """Check data and models. Raises `DataError`, `ModelError`."""
        super().check_inputs()
        teacher = self.cfg.distillation.teacher_path
        if teacher is not None:  # it numbers tokens as the model does
            policy = str(self.cfg.model.path)
            refuse_other_tokens(self.tokenizer, load_tokenizer(teacher), policy=policy, teacher=teacher)

    def input_digests(self) -> dict[str, str]:
        """Digests of what a resumed run reads again, with the weights of the model that teaches."""
        path = self.cfg.distillation.teacher_path
        own = {} if path is None else model_digests("distillation.teacher_path", ModelConfig(path=path), weights=True)
        return super().input_digests() | own

    async def prepare(self) -> None:
        """Ask the served teacher, if there is one, for its limits."""
        await connect_teachers(
            self.served_teachers,
            self.tokenizer,
            str(self.cfg.model.path),
            longest=self.max_length,
            top=self.cfg.distillation.top_k or 0,
            address="distillation.endpoint.url",
            length="max_length",
        )

    async def close(self) -> None:
        """Close the connections to a served teacher."""
        await close_teachers(self.served_teachers)

    async def complete(self, batch: TrainingBatch) -> TrainingBatch:
        """The batch, whose rows carry what the model learns from the teacher: its hidden states at the learned tokens,
        or its likeliest tokens there.
        """
        teacher, settings = self.teacher, self.cfg.distillation
        if teacher is None:
            return batch
        with self.clock.measure("teacher"):
            if settings.top_k is None:
                assert isinstance(teacher, ScorerGroup)
                return batch.carrying(**{TEACHER_HIDDEN: await teacher.hidden(batch)})
            ids, logprobs = await teacher.token_logprobs(batch, settings.top_k, settings.temperature)
            return batch.carrying(**{TEACHER_IDS: ids, TEACHER_LOGPROBS: logprobs})

    async def complete_evaluated(self, batch: TrainingBatch) -> TrainingBatch:
        """The batch itself: an evaluation measures likelihood alone."""
        return batch

    def get_objective(self) -> Objective:
        settings = self.cfg.distillation
        return CrossEntropy(coef=settings.task_coef if settings.has_teacher else 1.0)

    def measure(self, scores: Tensor, batch: TrainingBatch) -> Sums:
        return likelihood(scores, batch)


class RewardModelExp(SupervisedExp):
    """Trains a model of which of two chats is better. Its learner is a critic: a body with a head for one number."""

    role: ClassVar[str] = "critic"
    cfg: RewardModelConfig
    worker = RewardModelWorker

    def load(self, sources: tuple[str, ...]) -> TokenizedRows[Any]:
        return load_preferences(sources, self.tokenizer, self.cfg, self.max_length)

    def synthetic_rows(self, vocabulary: int) -> TokenizedRows[Any]:
        return synthetic_pairs(self.cfg, self.max_length, vocabulary)

    def collate(self, rows: Sequence[Any]) -> TrainingBatch:
        return collate_pairs(rows, share_prompts=self.cfg.use_sequence_packing)

    def get_objective(self) -> Objective:
        return BradleyTerry()

    def measure(self, scores: Tensor, batch: TrainingBatch) -> Sums:
        return preferences(scores, batch)
