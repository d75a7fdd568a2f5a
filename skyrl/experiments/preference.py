"""Training runs that learn from pairs of answers without a reward model: DPO and variants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor

from skyrl.algorithms.preferences import PairLoss, Pairs, PairSettings
from skyrl.batch import RowTensors, TrainingBatch
from skyrl.checkpoint.handover import WeightFiles
from skyrl.checkpoint.shards import StoredTensors
from skyrl.config import PreferenceConfig
from skyrl.config.derive.supervised_rules import MODEL
from skyrl.config.foundation.import_paths import Imported
from skyrl.config.settings.preference_root import PREFERENCE_LOSSES
from skyrl.data.preference_rows import ReferencedRows, load_preference_rows, logprobs_file, store_logprobs
from skyrl.data.supervised_rows import TokenizedRows
from skyrl.errors import ConfigError, Problem
from skyrl.experiments.full_length import synthetic_answers, synthetic_labelled
from skyrl.experiments.sft import SCORED_AT_A_TIME, SupervisedExp
from skyrl.learners.workers.group import ScorerGroup
from skyrl.learners.workers.learning_worker import weighed
from skyrl.learners.workers.model_worker import ModelWorker
from skyrl.learners.workers.preference_objective import LabelObjective, PreferenceObjective
from skyrl.learners.workers.preference_roles import (
    PairReferenceWorker,
    PreferenceLearner,
    PreferenceWorker,
    reference_model,
)
from skyrl.runs.input_digests import adapter_digests, model_digests
from skyrl.runs.inputs import notice
from skyrl.storage.disk import Disk
from skyrl.training.collate import collate_answers, collate_labelled, mismatched
from skyrl.training.supervised_evaluation import Sums
from skyrl.tree.frames import described


def preference_objective(run: PreferenceConfig) -> PreferenceObjective | LabelObjective:
    """The objective that the settings describe."""
    if run.unpaired:
        weights_of = {name: getattr(run, name) for name in ("desirable_weight", "undesirable_weight")}
        return LabelObjective(beta=run.beta, **weights_of)
    weights = run.loss_weights or (1.0,) * len(run.loss_type)
    own = {name: Imported(name) for name in run.loss_type if name not in PREFERENCE_LOSSES}
    settings = {field.name: getattr(run, field.name) for field in attrs.fields(PairSettings)}
    return PreferenceObjective(
        losses=tuple(zip(run.loss_type, weights, strict=True)),
        settings=PairSettings(**settings),
        own=own,
        answers=run.num_answers,
        weighted=run.use_weighting,
        ld_alpha=run.ld_alpha,
        averages=run.facts[0].averages,
    )


def reference_digests(run: PreferenceConfig) -> dict[str, str]:
    """Digests of the files of the reference, by the fields that name them: see `skyrl.runs.input_digests`."""
    model, field = reference_model(run), "model.path" if run.ref_model_path is None else "ref_model_path"
    return model_digests(field, model, weights=True) | adapter_digests("model.lora.path", model)


def tried(name: str, loss: PairLoss, settings: PairSettings) -> None:
    """Call a loss of the user's own with a few pairs, together and one by one. Raises `ConfigError` if it fails, does
    not give a number for each pair, or compares pairs with each other, whose micro-batches may differ.
    """
    numbers = -torch.arange(1.0, 13.0).square().view(4, 3) / 10
    tokens = torch.tensor([2, 3, 4])

    def losses_of(pairs: slice) -> Tensor:
        chosen, rejected, ref_chosen, ref_rejected = (number[pairs] for number in numbers)
        return loss(
            Pairs(
                chosen=chosen,
                rejected=rejected,
                ref_chosen=ref_chosen,
                ref_rejected=ref_rejected,
                chosen_tokens=tokens[pairs],
                rejected_tokens=tokens[pairs],
            ),
            settings,
        )

    try:
        losses, parts = losses_of(slice(3)), [losses_of(slice(index, index + 1)) for index in range(3)]
    except Exception as error:  # the user's code may raise anything
        raise _refused(f"{name} fails with three pairs: {described(error)}") from error
    shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
    if shape != (3,):
        raise _refused(f"{name} gives {shape} for three pairs, not a tensor with a number for each")
    if not torch.isfinite(losses).all():
        raise _refused(f"{name} gives {losses.tolist()} for three pairs, and a loss has to be finite")
    if not torch.allclose(losses, torch.cat(parts)):
        raise _refused(f"the loss of a pair by {name} depends on the other pairs of its micro-batch")


def _refused(message: str) -> ConfigError:
    hint = "it is called as loss(pairs, settings): see docs/preferences.md"
    return ConfigError([Problem(path="loss_type", message=message, hint=hint)])


class PreferenceExp(SupervisedExp):
    """Trains a policy on which of two answers is better, compared with a reference if its losses are."""

    cfg: PreferenceConfig
    worker = PreferenceWorker
    learner_group: ClassVar[type[PreferenceLearner]] = PreferenceLearner

    @cached_property
    def reference(self) -> ScorerGroup[PairReferenceWorker]:
        """The model that the policy is compared with, on the ranks of the policy. Started when it is first needed."""
        ranks = self.ranks_of("ref", MODEL.ranks(self.cfg), self.replicas)
        makers = [partial(PairReferenceWorker, self.cfg, ranks=rank) for rank in ranks]
        started = self.processes.start("ref", makers)
        rows = self.cfg.rows_of_an_item
        return ScorerGroup(started, self.budget(), replicas=self.replicas, rows_of_an_item=rows)

    @property
    def moves_reference(self) -> bool:
        """Whether the policy is mixed into the reference while it trains."""
        return self.cfg.compares and self.cfg.sync_ref_model

    @property
    def checkpointed_models(self) -> Mapping[str, ScorerGroup[ModelWorker]]:
        """The models that a checkpoint holds: the policy, and a reference that moves."""
        return {**self.learners, **({"ref": self.reference} if self.moves_reference else {})}

    async def refresh_reference(self) -> None:
        """Mix the policy, into which an adapter is merged, into the reference."""
        with TemporaryDirectory(prefix=".reference_", dir=self.folder.path) as scratch:  # all ranks see this folder
            storage = Disk(Path(scratch))
            files = await self.learner.export_weights(WeightFiles(storage=storage, folder="policy"))
            await self.reference.mix(StoredTensors(storage, "policy", files), self.cfg.ref_model_mixup_alpha)

    def check_inputs(self) -> None:
        """Check data and model as for every supervised run, and losses of the user's own. Raises `UserError`."""
        super().check_inputs()
        objective = self.get_objective()
        if isinstance(objective, PreferenceObjective):
            for name, loss in objective.own.items():
                tried(name, loss, objective.settings)

    def load(self, sources: tuple[str, ...]) -> TokenizedRows[Any]:
        return load_preference_rows(sources, self.tokenizer, self.cfg, self.max_length)

    def synthetic_rows(self, vocabulary: int) -> TokenizedRows[Any]:
        make = synthetic_labelled if self.cfg.unpaired else synthetic_answers
        return make(self.cfg, self.max_length, vocabulary)

    def collate(self, rows: Sequence[Any]) -> TrainingBatch:
        if self.cfg.unpaired:
            return collate_labelled(rows)
        return collate_answers(rows, self.cfg.num_answers, share_prompts=self.cfg.use_sequence_packing)

    def get_objective(self) -> PreferenceObjective | LabelObjective:
        return preference_objective(self.cfg)

    def input_digests(self) -> dict[str, str]:
        """Digests of what a resumed run reads again, with the reference."""
        stays = self.cfg.compares and not self.moves_reference
        return super().input_digests() | (reference_digests(self.cfg) if stays else {})

    async def prepare(self) -> None:
        """Compute the log-probabilities of the reference for all rows, or read those that are stored, if configured."""
        cfg = self.cfg
        if not (cfg.compares and cfg.precompute_ref_log_probs) or cfg.num_dummy_steps:
            return
        self.train_dataset = await self._add_reference("training", self.train_dataset)
        self.eval_datasets = {name: await self._add_reference(name, rows) for name, rows in self.eval_datasets.items()}
        if "reference" in self.__dict__:
            await self.reference.offload()

    async def _add_reference(self, name: str, rows: TokenizedRows[Any]) -> TokenizedRows[Any]:
        file = self._reference_file(rows)
        if not file.exists():  # otherwise an earlier session, or another run, has stored them
            notice(f"computing the log-probabilities of the reference for {len(rows)} {name} pairs, once")
            parts, size = [], max(self.cfg.batch_size, SCORED_AT_A_TIME)
            for start in range(0, len(rows), size):
                batch = self.collate(rows.rows[start : start + size])
                parts.append(batch.pick(await self._score_reference(batch)).numpy())
            store_logprobs(file, parts)
        return attrs.evolve(rows, rows=ReferencedRows(rows.rows, file))

    def _reference_file(self, rows: TokenizedRows[Any]) -> Path:
        """The file of the reference's log-probabilities of these rows."""
        folder = Path(self.cfg.ref_log_probs_path or self.folder.path / "ref_log_probs").expanduser()
        digests = sorted(reference_digests(self.cfg).items())
        return logprobs_file(folder, rows.fingerprint, (reference_model(self.cfg), digests, self.cfg.compute_dtype))

    async def _score_reference(self, batch: TrainingBatch) -> Tensor:
        if self.cfg.reference_is_policy:
            assert isinstance(self.learner, PreferenceLearner)
            return await self.learner.score_reference(batch)
        return await self.reference.score(batch)

    async def complete(self, batch: TrainingBatch) -> TrainingBatch:
        """The batch with log-probabilities of the reference, and of the policy where a loss sorts the batch by them."""
        if self.cfg.compares and batch.ref_logprobs is None:
            with self.clock.measure("ref_logprobs"):
                batch = batch.with_fields(ref_logprobs=await self._score_reference(batch))
        if "kto" in self.cfg.loss_type:
            batch = await self._add_kto_baseline(batch)
        if any(loss.whole_batch for loss in self.cfg.facts):
            with self.clock.measure("policy_logprobs"):
                batch = batch.with_fields(old_logprobs=await self.learner.score(batch))
        return batch

    async def _add_kto_baseline(self, batch: TrainingBatch) -> TrainingBatch:
        """The batch with KTO's z: the mean log-ratio of prompts with answers of other rows, at least 0. A row alone has
        no other: its z is 0.
        """
        if len(batch) == 1:
            return batch
        others = mismatched(batch, self.max_length)
        with self.clock.measure("policy_logprobs"):
            ratios = await self.learner.score(others)
        if self.cfg.compares:
            with self.clock.measure("ref_logprobs"):
                ratios = ratios - await self._score_reference(others)
        baseline = ratios.sum(1).mean().clamp(min=0).expand(len(batch))
        ones = torch.ones(len(batch), dtype=torch.long)
        return batch.carrying(baseline=RowTensors(values=baseline, counts=ones))

    def measure(self, scores: Tensor, batch: TrainingBatch) -> Sums:
        objective = self.get_objective()
        _, parts, _ = objective(scores, weighed(objective, batch.with_fields(old_logprobs=scores)))
        items = len(batch) / self.cfg.rows_of_an_item
        good = batch.extras["label"].values.sum().item() if self.cfg.unpaired else items
        counts = {"chosen": good, "rejected": items - good if self.cfg.unpaired else items}
        terms = {name: counts.get(name.partition("_")[0], items) for name in parts}
        return {name: (value.item() * terms[name], terms[name]) for name, value in parts.items()}
