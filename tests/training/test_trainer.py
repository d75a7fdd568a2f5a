"""One step of the algorithm with collaborators that write down what they are asked, and its averages."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor

from skyrl.batch import TrainingBatch
from skyrl.config import AlgorithmConfig, TrainerConfig
from skyrl.learners.schedule import StepSettings
from skyrl.learners.workers.learning_worker import Objective
from skyrl.learners.workers.objectives import ReturnRegression
from skyrl.training.advantage import reward_shaping
from skyrl.training.describe import average
from skyrl.training.objective import policy_objective
from skyrl.training.trainer import AS_CONFIGURED, PPOTrainer, RolloutPosition
from skyrl.trajectory import TrajectoryGroup
from tests.training.test_metrics import answer, group

GROUPS: tuple[TrajectoryGroup, ...] = (
    group(answer("11", 1.0), answer("1", 0.0)),
    group(answer("111", 0.0), answer("0", 0.0)),
)


class Model:
    """Scores every token alike, and counts what it learns from."""

    def __init__(self, name: str, score: float, calls: list[str]) -> None:
        self._name, self._score, self._calls = name, score, calls
        self.seen: list[TrainingBatch] = []

    async def score(self, batch: TrainingBatch) -> Tensor:
        self._calls.append(f"{self._name} scores {len(batch)}")
        return torch.full(batch.loss_mask.shape, self._score)

    async def forward_backward(self, batch: TrainingBatch, objective: Objective) -> dict[str, float]:
        assert isinstance(objective, ReturnRegression) == (self._name == "critic")
        self._calls.append(f"{self._name} learns {len(batch)}")
        self.seen.append(batch)
        return {"loss": float(len(self.seen))}

    async def optimizer_step(self, settings: StepSettings) -> dict[str, float]:
        assert settings == AS_CONFIGURED
        self._calls.append(f"{self._name} steps")
        return {"skipped_updates": 0.0}


class World:
    """A trainer at version 5."""

    def __init__(self, *, others: bool, epochs: int, mini: int, algorithm: AlgorithmConfig | None = None) -> None:
        self.calls: list[str] = []
        self.policy, self.critic = Model("policy", -1.0, self.calls), Model("critic", 3.0, self.calls)
        self.epoch = 4
        self.groups = GROUPS
        config = evolve(
            TrainerConfig(update_epochs_per_batch=epochs, algorithm=algorithm or AlgorithmConfig()),
            policy_mini_batch_size_in_samples=mini,
            critic_mini_batch_size_in_samples=4,
        )
        world: Any = self
        self.trainer = PPOTrainer(
            trainer_cfg=config,
            rollouts=world,
            policy=self.policy,
            reference=Model("reference", -2.0, self.calls) if others else None,
            critic=self.critic if others else None,
            objective=policy_objective(config.algorithm),
            critic_objective=ReturnRegression(value_clip=None),
            weights=world,
            shape_rewards=lambda batch: (batch.rewards + 1, {"shaped": 1.0}),
            estimate_advantages=lambda batch: batch.rewards * batch.loss_mask,
            critic_targets=lambda batch: torch.full(batch.loss_mask.shape, 7.0),
            position=RolloutPosition(world, reward_shaping(config.algorithm)),
        )
        assert self.trainer.version == 0
        self.trainer.version = 5

    async def next_batch(self, version: int) -> tuple[TrajectoryGroup, ...]:
        self.calls.append(f"sample by {version}")
        return self.groups

    def metrics(self) -> dict[str, float]:
        return {"rollout/replaced": 2.0}

    async def publish(self, version: int) -> dict[str, float]:
        self.calls.append(f"publish {version}")
        return {"weight_sync/parity_mean": 0.5}

    def state(self) -> dict[str, Any]:
        return {"place": 9}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.epoch = state["place"]


EXPECTED = {
    "policy/loss": 2.5,  # of four updates, 1 to 4
    "critic/loss": 1.5,
    "policy/mini_batches_without_a_token": 0,
    "policy/response_length": 6 / 4,
    "reward/avg_raw_reward": 0.25,
    "rollout/replaced": 2.0,
    "loss/avg_final_rewards": (1 + 4 * 5) / 4,  # 1 more at each of 4 x 5 places
    "shaped": 1.0,
    "weight_sync/parity_mean": 0.5,
}


async def test_a_step_goes_from_samples_to_new_weights_in_the_engines() -> None:
    world = World(others=True, epochs=2, mini=2)
    metrics = await world.trainer.step()
    assert world.calls == [
        *("sample by 5", "policy scores 4", "reference scores 4", "critic scores 4"),
        *("critic learns 4", "critic steps") * 2,
        *("policy learns 2", "policy steps") * 4,
        "publish 6",
    ]
    batch = world.critic.seen[0]
    assert batch.old_logprobs is not None and batch.ref_logprobs is not None and batch.values is not None
    known = (batch.old_logprobs, batch.ref_logprobs, batch.values)
    assert [tensor[0, 0].item() for tensor in known] == [-1.0, -2.0, 3.0]
    assert batch.returns is not None and batch.returns[0, 0] == 7.0
    assert world.policy.seen[0].returns is not None  # the policy learns from what the critic's step made
    assert {name: metrics[name] for name in EXPECTED} == pytest.approx(EXPECTED)


async def test_a_single_update_needs_no_old_probabilities_and_no_other_model() -> None:
    world = World(others=False, epochs=1, mini=4)
    metrics = await world.trainer.step()
    assert world.calls == ["sample by 5", "policy learns 4", "policy steps", "publish 6"]
    assert world.policy.seen[0].old_logprobs is None
    assert not any(name.startswith("critic/") for name in metrics)
    assert await world.trainer.begin() == {"weight_sync/parity_mean": 0.5}
    assert world.calls[-1] == "publish 5"


async def test_the_engines_own_probabilities_may_be_the_old_ones() -> None:
    world = World(others=False, epochs=2, mini=2, algorithm=AlgorithmConfig(old_logprobs="engine"))
    await world.trainer.step()
    assert "policy scores 4" not in world.calls
    old, sampled = world.policy.seen[0].old_logprobs, world.policy.seen[0].rollout_logprobs
    assert old is not None and sampled is not None and torch.equal(old, sampled)


async def test_interpolated_probabilities_know_how_old_each_token_is() -> None:
    world = World(others=False, epochs=1, mini=4, algorithm=AlgorithmConfig(old_logprobs="interpolated"))
    world.groups = (group(answer("111", 1.0, weight_versions=(1, 3, 5)), answer("1", 0.0, weight_versions=(4,))),)
    await world.trainer.step()
    [batch] = world.policy.seen
    assert batch.interpolation is not None and batch.old_logprobs is not None and batch.rollout_logprobs is not None
    assert batch.interpolation[:, 2:].tolist() == [[0.75, 0.5, 0.0], [0.0, 0.0, 0.0]]  # 4, 2 and 0 versions; 1
    assert torch.equal(batch.old_logprobs, batch.rollout_logprobs)


@pytest.mark.parametrize(("bound", "learned"), [(2.5, 2), (3.0, 4), (None, 4)])
async def test_a_mini_batch_that_the_policy_has_moved_too_far_from_is_left_out(
    bound: float | None, learned: int
) -> None:
    world = World(others=False, epochs=2, mini=2, algorithm=AlgorithmConfig(max_importance_ratio=bound))
    ratios = iter([1.0, 1.0, 2.0, 2.9, 2.6])  # of the batch before any update, then of each mini-batch

    async def score(batch: TrainingBatch) -> Tensor:
        return torch.full(batch.loss_mask.shape, -1.0 + math.log(next(ratios)))

    world.policy.score = score  # type: ignore[method-assign]  # the policy moves from update to update
    metrics = await world.trainer.step()
    assert len(world.policy.seen) == learned
    assert metrics.get("policy/mini_batches_moved_too_far") == (None if bound is None else 4 - learned)


async def test_a_mini_batch_without_a_token_is_not_learned_from_and_is_counted() -> None:
    world = World(others=False, epochs=1, mini=1)  # the last answer has no token that is trained on
    metrics = await world.trainer.step()
    assert (metrics["policy/mini_batches_without_a_token"], len(world.policy.seen)) == (1, 3)


@pytest.mark.parametrize(
    ("updates", "expected"),
    [
        ([], {"skipped_updates": 0.0}),
        (
            [{"loss": 1.0, "skipped_updates": 0.0}, {"loss": 3.0, "norm": 5.0, "skipped_updates": 0.0}],
            {"loss": 2.0, "norm": 5.0, "skipped_updates": 0.0},
        ),
        (
            [{"loss": 1.0, "skipped_updates": 0.0}, {"loss": math.nan, "skipped_updates": 1.0}],
            {"loss": 1.0, "skipped_updates": 1.0},
        ),
        ([{"loss": math.nan, "norm": 2.0, "skipped_updates": 1.0}] * 2, {"norm": 2.0, "skipped_updates": 2.0}),
    ],
)
def test_updates_are_averaged_without_those_that_were_skipped(
    updates: list[dict[str, float]], expected: dict[str, float]
) -> None:
    assert average(updates) == expected


def test_the_position_counts_samples_and_tokens_and_is_stored() -> None:
    position = World(others=False, epochs=1, mini=4).trainer.position
    for _ in range(2):
        position.count(GROUPS, 5)
    assert position.metrics() == {"trainer/epoch": 4, "trainer/samples_seen": 8, "trainer/tokens_seen": 14}
    state = position.state()
    assert state == {"samples_seen": 8, "tokens_seen": 14, "rollouts": {"place": 9}, "rewards": {}}
    restored = World(others=False, epochs=1, mini=4).trainer.position
    restored.load_state(state)
    assert restored.metrics() == {"trainer/epoch": 9, "trainer/samples_seen": 8, "trainer/tokens_seen": 14}


def test_the_weight_of_the_penalty_is_stored_with_the_position_and_taken_back() -> None:
    def position() -> RolloutPosition:
        rollouts: Any = World(others=False, epochs=1, mini=4)
        return RolloutPosition(
            rollouts, reward_shaping(AlgorithmConfig(use_kl_in_reward=True, use_kl_loss=False, kl_loss_coef=0.5))
        )

    original, changed = position(), position()
    changed.load_state({**original.state(), "rewards": {"kl_coef": 0.25}})
    assert changed.state()["rewards"] == {"kl_coef": 0.25}
    changed.take_back_shaping(original.state())
    assert changed.state()["rewards"] == {"kl_coef": 0.5}
