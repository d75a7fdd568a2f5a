"""Supervised rows as batches, their evaluation, and the position in them, by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from torch import Tensor

from skyrl.batch import TrainingBatch
from skyrl.config.settings.supervised_root import SFTConfig
from skyrl.data.tokenized_rows import PreferenceRow, SupervisedRow
from skyrl.errors import ResumeError
from skyrl.learners.schedule import StepSettings
from skyrl.learners.workers.learning_worker import Objective
from skyrl.learners.workers.objectives import CrossEntropy
from skyrl.training.collate import collate_pairs, collate_supervised, common_beginning
from skyrl.training.supervised import RowPosition, SupervisedEvaluation, SupervisedTrainer, likelihood, preferences


def row(ids: list[int], weights: list[float]) -> SupervisedRow:
    return SupervisedRow(id="r", token_ids=np.array(ids), weights=np.array(weights, np.float32))


def pair(chosen: list[int], rejected: list[int], margin: float = 0.0) -> PreferenceRow:
    return PreferenceRow(id="p", chosen=np.array(chosen), rejected=np.array(rejected), margin=margin)


ROWS = [row([1, 2, 3], [0, 1, 1]), row([4, 5], [0, 1])]
PAIRS = [pair([1, 2, 3], [1, 2, 4, 5]), pair([6], [7, 8], margin=0.5)]


def test_rows_are_padded_and_their_learned_tokens_selected() -> None:
    batch = collate_supervised(ROWS)
    assert batch.input_ids.tolist() == [[1, 2, 3], [4, 5, 0]]
    assert batch.loss_mask.tolist() == [[False, True, True], [False, True, False]]
    assert (batch.lengths.tolist(), batch.groups.tolist()) == ([3, 2], [0, 1])
    assert (batch.token_weights, batch.answer_lengths) == (None, None)
    assert not batch.rewards.any()
    assert batch.rollout_logprobs is not None and not batch.rollout_logprobs.any()


def test_weights_are_kept_where_they_are_not_all_one() -> None:
    batch = collate_supervised([row([1, 2, 3], [0, 0.5, 1])])
    assert batch.token_weights is not None and batch.token_weights.tolist() == [[0.0, 0.5, 1.0]]
    assert batch.loss_mask.tolist() == [[False, True, True]]


def test_a_pair_is_two_rows_whose_values_are_at_one_more_token() -> None:
    batch = collate_pairs(PAIRS)
    assert batch.input_ids.tolist() == [[1, 2, 3, 0, 0], [1, 2, 4, 5, 0], [6, 0, 0, 0, 0], [7, 8, 0, 0, 0]]
    assert batch.loss_mask.int().tolist() == [[0, 0, 0, 1, 0], [0, 0, 0, 0, 1], [0, 1, 0, 0, 0], [0, 0, 1, 0, 0]]
    assert (batch.lengths.tolist(), batch.groups.tolist()) == ([4, 5, 2, 3], [0, 0, 1, 1])
    assert batch.answer_lengths is not None and batch.answer_lengths.tolist() == [2, 3, 2, 3]  # 1, 2 begins both
    assert batch.rewards.nonzero().tolist() == [[2, 1]] and batch.rewards[2, 1] == 0.5
    single = collate_pairs(PAIRS[:1], share_prompts=False)
    assert single.answer_lengths is not None and single.answer_lengths.tolist() == [4, 5]
    assert not single.rewards.any()


@pytest.mark.parametrize(
    ("one", "other", "count"),
    [([1, 2, 3], [1, 2, 4], 2), ([1, 2], [1, 2, 3], 1), ([1, 2, 3], [1, 2, 3], 2), ([1], [1], 0), ([5, 1], [6, 1], 0)],
)
def test_a_common_beginning_is_shorter_than_either(one: list[int], other: list[int], count: int) -> None:
    assert common_beginning(np.array(one), np.array(other)) == count


# Evaluation


class Scores:
    """Gives the tokens of each batch the next of the numbers."""

    def __init__(self, *numbers: float) -> None:
        self._numbers = list(numbers)

    async def score(self, batch: TrainingBatch) -> Tensor:
        return torch.full(batch.loss_mask.shape, self._numbers.pop(0))


async def test_every_set_is_evaluated_by_itself_and_all_together_token_by_token() -> None:
    evaluation = SupervisedEvaluation({"a": ROWS, "b": ROWS[:1]}, collate_supervised, likelihood, batch_size=1)
    metrics = await evaluation.run(Scores(-1.0, -4.0, -2.5))  # two tokens, one, two
    assert metrics == pytest.approx(
        {
            "eval/a/loss": 2.0,
            "eval/a/perplexity": math.exp(2.0),
            "eval/b/loss": 2.5,
            "eval/b/perplexity": math.exp(2.5),
            "eval/all/loss": 11 / 5,
            "eval/all/perplexity": math.exp(11 / 5),
        }
    )


async def test_a_hopeless_perplexity_stays_a_number_and_nothing_learned_is_nothing_to_say() -> None:
    evaluation = SupervisedEvaluation({"a": ROWS}, collate_supervised, likelihood, batch_size=2)
    assert (await evaluation.run(Scores(-1000.0)))["eval/a/perplexity"] == pytest.approx(1e30)
    assert await SupervisedEvaluation({"a": []}, collate_supervised, likelihood, batch_size=2).run(Scores()) == {}


def test_a_token_of_half_the_weight_counts_half() -> None:
    batch = collate_supervised([row([1, 2, 3], [0, 0.5, 1])])
    assert likelihood(torch.tensor([[float("nan"), -2.0, -3.0]]), batch) == {"loss": (4.0, 1.5)}


async def test_pairs_are_in_the_right_order_where_the_chosen_one_scores_more() -> None:
    values = torch.zeros(4, 5)
    values[0, 3], values[1, 4], values[2, 1], values[3, 2] = 2.0, 1.0, 1.0, 1.0
    metrics = preferences(values, collate_pairs(PAIRS))  # better by 1, and equal where the margin is 0.5
    losses = math.log1p(math.exp(-1.0)) + math.log1p(math.exp(0.5))
    assert metrics == {"loss": (pytest.approx(losses), 2.0), "accuracy": (1.0, 2.0), "margin": (1.0, 2.0)}
    evaluation = SupervisedEvaluation({"p": PAIRS[:1]}, collate_pairs, preferences, batch_size=8)
    assert "eval/p/perplexity" not in await evaluation.run(Scores(0.0))


# Position and step


class Rows:
    """A cursor over batches that are numbers."""

    def __init__(self) -> None:
        self.place = 0

    @property
    def epoch(self) -> int:
        return self.place // 2

    def take(self) -> list[SupervisedRow]:
        self.place += 1
        return ROWS

    def metrics(self) -> dict[str, float]:
        return {"curriculum/stage": 1.0}

    def state(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


def position(total_steps: int, **settings: Any) -> RowPosition[SupervisedRow]:
    run = SFTConfig()
    optimizer = evolve(run.optimizer_config, **{key: settings[key] for key in settings if key != "may_change"})
    run = evolve(run, optimizer_config=optimizer, resume_with_changes=settings.get("may_change", False))
    rows: Any = Rows()
    return RowPosition(rows, total_steps, run)


def test_the_epoch_is_that_of_the_last_batch_and_the_place_is_stored() -> None:
    current = position(10)
    epochs = []
    for _ in range(3):
        current.take()
        metrics = current.metrics()
        epochs.append(metrics.pop("trainer/epoch"))
        assert metrics == {"curriculum/stage": 1.0}  # of the sampler
    assert (epochs, current.epoch) == ([0.0, 0.0, 1.0], 1)
    assert (current.state(), current.data()) == ({"total_steps": 10, "rows": {"place": 3}}, {"rows": {"place": 3}})
    restored = position(10)
    restored.load_state(current.state())
    restored.load_state(current.data())  # of a return to a checkpoint within the run
    assert restored.data() == current.data()


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({"scheduler": "cosine"}, True),
        ({"scheduler": "linear"}, True),
        ({"scheduler": "constant"}, False),
        ({"scheduler": "constant_with_warmup"}, False),
        ({"scheduler": "constant_with_warmup", "warmup_steps_proportion": 0.1}, True),
        ({"scheduler": "cosine", "may_change": True}, False),
    ],
    ids=str,
)
def test_another_length_is_refused_where_the_learning_rate_depends_on_it(
    settings: dict[str, Any], refused: bool
) -> None:
    state = {"total_steps": 10, "rows": {"place": 3}}
    position(10, **settings).load_state(state)
    longer = position(20, **settings)
    if not refused:
        longer.load_state(state)
        return
    with pytest.raises(ResumeError, match="the run had 10 steps when the checkpoint was saved, and has 20"):
        longer.load_state(state)


async def test_a_step_learns_from_one_batch_and_counts_its_tokens() -> None:
    class Learner:
        async def forward_backward(self, batch: TrainingBatch, objective: Objective) -> dict[str, float]:
            assert objective == CrossEntropy()
            return {"policy_loss": 0.5}

        async def optimizer_step(self, settings: StepSettings) -> dict[str, float]:
            return {"critic_lr": 0.1, "norm": 2.0}

    learner: Any = Learner()
    trainer = SupervisedTrainer(position(10), collate_supervised, learner, CrossEntropy())
    assert (trainer.version, await trainer.begin()) == (0, {})
    assert await trainer.step() == {
        "train/loss": 0.5,
        "train/lr": 0.1,
        "train/norm": 2.0,
        "train/tokens": 5.0,
        "train/learned_tokens": 3.0,
    }
