"""Training runs that learn from pairs of answers without a reward model: DPO and its kin."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor

from skyrl.algorithms.preferences import PairSettings
from skyrl.batch import RowTensors, TrainingBatch
from skyrl.config import PreferenceConfig
from skyrl.config.derive.supervised_rules import MODEL
from skyrl.data.labelled_rows import load_preference_rows
from skyrl.data.reference_logprobs import ReferencedRows, is_stored, logprobs_file, store_logprobs
from skyrl.data.supervised_rows import TokenizedRows
from skyrl.experiments.full_length import made_up_answers, made_up_labelled
from skyrl.experiments.sft import SCORED_AT_A_TIME, SupervisedExp
from skyrl.learners.workers.group import ScorerGroup
from skyrl.learners.workers.learning_worker import weighed
from skyrl.learners.workers.preference_objective import LabelObjective, PreferenceObjective
from skyrl.learners.workers.preference_roles import (
    PairReferenceWorker,
    PreferenceLearner,
    PreferenceWorker,
    reference_model,
)
from skyrl.runs.inputs import notice
from skyrl.runs.read_again import adapter_digests, model_digests
from skyrl.training.collate import collate_answers, collate_labelled, mismatched
from skyrl.training.supervised_evaluation import Sums


def preference_objective(run: PreferenceConfig) -> PreferenceObjective | LabelObjective:
    """The objective that the settings describe."""
    if run.unpaired:
        weights_of = {name: getattr(run, name) for name in ("desirable_weight", "undesirable_weight")}
        return LabelObjective(beta=run.beta, **weights_of)
    weights = run.loss_weights or (1.0,) * len(run.loss_type)
    settings = {each.name: getattr(run, each.name) for each in attrs.fields(PairSettings)}
    return PreferenceObjective(
        losses=tuple(zip(run.loss_type, weights, strict=True)),
        settings=PairSettings(**settings),
        ld_alpha=run.ld_alpha,
        averages=run.facts[0].averages,
    )


class PreferenceExp(SupervisedExp):
    """Trains a policy on which of two answers is better, compared with a reference if its losses are."""

    cfg: PreferenceConfig
    worker = PreferenceWorker
    learner_group: ClassVar[type[PreferenceLearner]] = PreferenceLearner

    @cached_property
    def reference(self) -> ScorerGroup[PairReferenceWorker]:
        """The model that the policy is compared with, on the ranks of the policy. Started when it is first needed."""
        ranks = self.ranks_of("ref", MODEL.ranks(self.cfg), self.replicas)
        makers = [partial(PairReferenceWorker, self.cfg, ranks=each) for each in ranks]
        started = self.processes.start("ref", makers)
        rows = self.cfg.rows_of_an_item
        return ScorerGroup(started, self.budget(), replicas=self.replicas, rows_of_an_item=rows)

    def load(self, sources: tuple[str, ...]) -> TokenizedRows[Any]:
        return load_preference_rows(sources, self.tokenizer, self.cfg, self.max_length)

    def made_up_rows(self, vocabulary: int) -> TokenizedRows[Any]:
        make = made_up_labelled if self.cfg.unpaired else made_up_answers
        return make(self.cfg, self.max_length, vocabulary)

    def collate(self, rows: Sequence[Any]) -> TrainingBatch:
        if self.cfg.unpaired:
            return collate_labelled(rows)
        return collate_answers(rows, share_prompts=self.cfg.use_sequence_packing)

    def get_objective(self) -> PreferenceObjective | LabelObjective:
        return preference_objective(self.cfg)

    def read_again(self) -> dict[str, str]:
        """Digests of what a resumed run reads again, with the reference."""
        return super().read_again() | (self._reference_digests() if self.cfg.compares else {})

    def _reference_digests(self) -> dict[str, str]:
        model, field = reference_model(self.cfg), "model.path"
        if self.cfg.ref_model_path is not None:
            field = "ref_model_path"
        return model_digests(field, model, weights=True) | adapter_digests("model.lora.path", model)

    async def prepare(self) -> None:
        """Compute the log-probabilities of the reference for all rows, or read those that are stored, if configured."""
        cfg = self.cfg
        if not (cfg.compares and cfg.precompute_ref_log_probs) or cfg.num_dummy_steps:
            return
        self.train_dataset = await self._with_reference("training", self.train_dataset)
        self.eval_datasets = {name: await self._with_reference(name, rows) for name, rows in self.eval_datasets.items()}
        if "reference" in self.__dict__:
            await self.reference.offload()

    async def _with_reference(self, name: str, rows: TokenizedRows[Any]) -> TokenizedRows[Any]:
        file = self._reference_file(rows)
        if not is_stored(file):
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
        digests = sorted(self._reference_digests().items())
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
                batch = batch.given(ref_logprobs=await self._score_reference(batch))
        if "kto" in self.cfg.loss_type:
            batch = await self._with_baseline(batch)
        if any(loss.whole_batch for loss in self.cfg.facts):
            with self.clock.measure("policy_logprobs"):
                batch = batch.given(old_logprobs=await self.learner.score(batch))
        return batch

    async def _with_baseline(self, batch: TrainingBatch) -> TrainingBatch:
        """The batch with KTO's z: the mean log-ratio of prompts with answers of other rows, at least 0."""
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
        _, parts, _ = objective(scores, weighed(objective, batch.given(old_logprobs=scores)))
        items = len(batch) / self.cfg.rows_of_an_item
        good = batch.extras["label"].values.sum().item() if self.cfg.unpaired else items
        counts = {"chosen": good, "rejected": items - good if self.cfg.unpaired else items}
        terms = {name: counts.get(name.partition("_")[0], items) for name in parts}
        return {name: (value.item() * terms[name], terms[name]) for name, value in parts.items()}
