"""Online DPO: pairs are chosen by reward, scored by policy and reference, compared by the loss."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from skyrl.algorithms.ranked_pairs import Answers, OnlineDPOLoss, ranked_pairs, ties
from skyrl.batch import TrainingBatch
from skyrl.config import TrainerConfig
from skyrl.config.derive.algorithm_facts import loss_facts
from skyrl.training.describe import Metrics
from skyrl.training.scorer import Scorer


@attrs.frozen(kw_only=True)
class RankedPairs:
    """Makes pairs of the answers of a batch, and from each mini-batch the advantages whose policy gradient is the
    gradient of the pairs' loss.
    """

    loss: OnlineDPOLoss
    seed: int
    """Seed of the pairs under `random`, together with the tokens of the group."""

    def pairs(self, batch: TrainingBatch) -> Tensor:
        """(P, 2): indices, among the answers of the batch, of the better and the worse one of each pair."""
        tokens = torch.where(batch.loss_mask, batch.input_ids, 0).sum(1)
        keys = torch.zeros(batch.answers, dtype=torch.long).index_add(0, _answer_of_row(batch), tokens)
        return ranked_pairs(*_ranked(batch), choose=self.loss.pairs, keys=keys, seed=self.seed)

    def describe(self, batch: TrainingBatch) -> Metrics:
        """Counts of the pairs of a batch, and of what makes none."""
        pairs, (rewards, groups, able) = self.pairs(batch), _ranked(batch)
        paired = groups[pairs[:, 0]].unique()
        return {
            "loss/pairs": len(pairs),
            "loss/groups_without_a_pair": len(groups.unique()) - len(paired),
            "loss/tied_answers": ties(rewards, groups, able),
        }

    def pair_counts(self, batch: TrainingBatch) -> Tensor:
        """(B, L): at the trained tokens of an answer, the number of pairs in which it is the better one, minus the
        number in which it is the worse one.
        """
        pairs = self.pairs(batch)
        counts = torch.zeros(batch.answers)
        counts.index_add_(0, pairs[:, 0], torch.ones(len(pairs)))
        counts.index_add_(0, pairs[:, 1], -torch.ones(len(pairs)))
        return torch.where(batch.loss_mask, counts[_answer_of_row(batch)].unsqueeze(1), 0.0)

    async def score_paired(self, model: Scorer, batch: TrainingBatch) -> Tensor:
        """(B, L): log-probabilities of the answers that are in a pair; 0 for the others, which are not computed."""
        pairs, logprobs = self.pairs(batch), torch.zeros(batch.loss_mask.shape)
        rows = torch.isin(_answer_of_row(batch), pairs).nonzero().squeeze(1)
        if len(rows):
            values = await model.score(batch.select(rows))
            logprobs[rows, : values.shape[1]] = values
        return logprobs

    async def with_pair_advantages(self, policy: Scorer, batch: TrainingBatch) -> tuple[TrainingBatch, Metrics]:
        """A mini-batch with at least one pair, with its advantages under the current policy, and metrics of the pairs.
        The batch has the log-probabilities of the reference.
        """
        assert batch.ref_logprobs is not None
        pairs, logprobs = self.pairs(batch), await self.score_paired(policy, batch)
        answers = Answers(
            logprobs=_sum_per_answer(torch.where(batch.loss_mask, logprobs, 0.0), batch),
            ref_logprobs=_sum_per_answer(torch.where(batch.loss_mask, batch.ref_logprobs, 0.0), batch),
            tokens=_sum_per_answer(batch.loss_mask.float(), batch),
        )
        derivative, numbers = self.loss.derivative(answers, pairs)
        advantages = torch.where(batch.loss_mask, -derivative[_answer_of_row(batch)].unsqueeze(1), 0.0)
        return batch.with_fields(advantages=advantages), {
            f"pairs/{name}": values.mean().item() for name, values in numbers.items()
        }


def _ranked(batch: TrainingBatch) -> tuple[Tensor, Tensor, Tensor]:
    """(N,): of each answer its reward, its group, and whether a token of it is trained."""
    rewards, trained = _sum_per_answer(batch.rewards, batch), _sum_per_answer(batch.loss_mask.float(), batch) > 0
    return rewards, batch.groups[batch.ends], trained


def _answer_of_row(batch: TrainingBatch) -> Tensor:
    """(B,): index of each row's answer among those of the batch."""
    if batch.last_step is None:
        return torch.arange(len(batch))
    return batch.last_step.long().cumsum(0) - batch.last_step.long()


def _sum_per_answer(values: Tensor, batch: TrainingBatch) -> Tensor:
    """(B, L) -> (N,): the sum over all tokens of each answer."""
    return torch.zeros(batch.answers).index_add(0, _answer_of_row(batch), values.sum(1))


def ranked_pairs_of(trainer: TrainerConfig) -> RankedPairs | None:
    """The pairs that the loss compares; None for a loss of single answers."""
    if not loss_facts(trainer.algorithm).learns_from_pairs:
        return None
    chosen = trainer.algorithm.online_dpo
    return RankedPairs(
        loss=OnlineDPOLoss(loss_type=chosen.loss_type, beta=chosen.beta, pairs=chosen.pairs), seed=trainer.seed
    )
