"""Probes of `trainer.algorithm`: what the objective computes on a small batch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import attrs
import torch
from attrs import evolve

from skyrl.batch import (
    STUDENT_IDS,
    TEACHER_HIDDEN,
    TEACHER_IDS,
    TEACHER_LOGPROBS,
    TEACHER_PROMPT,
    RowTensors,
    TrainingBatch,
)
from skyrl.data.cursor import PromptCursor
from skyrl.errors import RunError
from skyrl.experiments.ppo import BasePPOExp
from skyrl.learners.distillation import TeacherLoss
from skyrl.learners.row_layouts import padded
from skyrl.learners.workers.objectives import ReturnRegression
from skyrl.rollout.batches import SynchronousRollouts
from skyrl.training.advantage import advantages_of, critic_targets, reward_shaping
from skyrl.training.objective import policy_objective
from skyrl.training.online_dpo import ranked_pairs_of
from skyrl.training.teacher import TeacherOfLikelyTokens
from skyrl.training.time_sharing import TimeSharing
from skyrl.training.trainer import update
from skyrl.trajectory import Prompt, TrajectoryGroup
from skyrl.tree import FrozenDict
from tests.effects.observables import plain
from tests.effects.probe import Observable, Probe, Scene, observable
from tests.learners.updating import CriticWorker, PolicyWorker
from tests.rollout.scripted import Scripted, trajectory

A = "trainer.algorithm."
CRITIC: dict[str, Any] = {"trainer.critic.model.path": "{nano}/model", "trainer.critic_mini_batch_size": 4}


def small_batch() -> TrainingBatch:
    """Eight answers of up to five tokens, two to each prompt. All log-probabilities differ by up to about two nats, and
    rewards are high and low, so that every bound is met by some token.
    """
    numbers = torch.Generator().manual_seed(1)
    lengths = torch.tensor([6, 5, 4, 6, 3, 6, 5, 6])
    columns = torch.arange(6)
    mask = (columns >= 1) & (columns < lengths.unsqueeze(1))

    def logprobs(spread: float) -> torch.Tensor:
        return torch.where(mask, -2.0 + spread * torch.randn(mask.shape, generator=numbers), 0.0)

    groups = torch.arange(8) // 2
    return TrainingBatch(
        input_ids=torch.where(columns == 0, groups.unsqueeze(1), torch.randint(9, 250, mask.shape, generator=numbers)),
        lengths=lengths,
        loss_mask=mask,
        rollout_logprobs=logprobs(0.7),
        old_logprobs=logprobs(0.7),
        ref_logprobs=logprobs(0.5),
        rewards=torch.where(mask, torch.randn(mask.shape, generator=numbers), 0.0),
        groups=groups,
        answer_lengths=lengths - 1,
        trajectory_lengths=lengths - 1,
        baselines=torch.randn(8, generator=numbers),
        advantages=torch.where(mask, torch.randn(mask.shape, generator=numbers), 0.0),
        values=torch.where(mask, torch.randn(mask.shape, generator=numbers), 0.0),
        returns=torch.where(mask, torch.randn(mask.shape, generator=numbers), 0.0),
        teacher_logprobs=torch.where(mask, -2.0 + torch.sin(columns + groups.unsqueeze(1)), 0.0),
        routed_experts=torch.rand((*mask.shape, 2, 4), generator=numbers).topk(2).indices.to(torch.int16),
    )


@observable("the policy's loss of a batch, and its gradient")
def policy_loss(scene: Scene) -> object:
    torch.manual_seed(0)  # clip_cov draws its tokens
    trainer, batch = scene.run.trainer, small_batch()
    objective = policy_objective(trainer.algorithm, micro_batch_rows=trainer.micro_train_batch_size_per_gpu)
    weighed = objective.weigh(batch)
    assert weighed.old_logprobs is not None
    logprobs = (weighed.old_logprobs + 0.5 * torch.sin(weighed.input_ids.float())).requires_grad_()
    loss, parts, numbers = objective(logprobs, weighed, entropy=logprobs.square() if objective.wants_entropy else None)
    loss.backward()
    return plain([loss, logprobs.grad, parts, numbers])


class Recalled:
    """A policy whose log-probabilities are those that the batch has as old ones."""

    async def score(self, batch: TrainingBatch) -> torch.Tensor:
        assert batch.old_logprobs is not None
        return batch.old_logprobs


@observable("the pairs of a batch with four answers to each prompt, their loss, and what each answer gains by it")
def ranked(scene: Scene) -> object:
    pairs, batch = ranked_pairs_of(scene.run.trainer), attrs.evolve(small_batch(), groups=torch.arange(8) // 4)
    assert pairs is not None
    compared, measured = asyncio.run(pairs.with_pair_advantages(Recalled(), batch))
    return plain([pairs.pairs(batch), compared.advantages, measured])


@observable("the advantages of a batch")
def advantages(scene: Scene) -> object:
    return plain(advantages_of(scene.run.trainer, 2)(small_batch()))


@observable("the prompt that a teacher reads")
def hinted_prompt(scene: Scene) -> object:
    experiment = BasePPOExp(scene.run)
    prompt = experiment.train_dataset.prompts[0]
    answers = tuple(
        evolve(trajectory(reward, index), prompt_ids=prompt.token_ids) for index, reward in enumerate((0, 1))
    )
    group = TrajectoryGroup(prompt=evolve(prompt, extras={"hint": "a", "other": "b"}), trajectories=answers)
    [hinted] = experiment.hints([group]) if experiment.hints else [group]
    return [list(row.extras[TEACHER_PROMPT].data) if row.extras else [] for row in hinted.trajectories]


@observable("a student's divergence from a teacher, its part of the loss, and its gradient")
def teacher_costs(scene: Scene) -> object:
    numbers = torch.Generator().manual_seed(1)
    batch, settings = small_batch(), scene.run.trainer.algorithm.distillation
    counts = batch.loss_mask.sum(1)
    tokens = int(counts.sum())
    student, teacher = (torch.randn(tokens, 8, generator=numbers).requires_grad_() for _ in range(2))
    matrix, other = (torch.randn(40, 8, generator=numbers) for _ in range(2))
    loss = TeacherLoss(settings, {TEACHER_HIDDEN: other})
    tensors = {TEACHER_HIDDEN: teacher.detach()}
    if settings.top_k is not None:
        logs, ids = (teacher.detach() @ other.T).log_softmax(-1).topk(settings.top_k)
        tensors = {TEACHER_IDS: ids, TEACHER_LOGPROBS: logs}
    batch = batch.carrying(**{name: RowTensors(values=values, counts=counts) for name, values in tensors.items()})
    costs, metrics = loss.cost(loss.columns(student, matrix, batch, padded(batch)))
    costs.sum().backward()
    return plain([costs, metrics, student.grad])


@observable("the tokens that a student is compared at")
def taught_tokens(scene: Scene) -> object:
    batch = small_batch()
    counts = batch.loss_mask.sum(1)

    async def likely(rows: TrainingBatch, count: int, temperature: float) -> tuple[RowTensors, RowTensors]:
        ids = torch.arange(int(counts.sum())).unsqueeze(1) + torch.arange(
            count + (4 if STUDENT_IDS in rows.extras else 0)
        )
        return RowTensors(values=ids, counts=counts), RowTensors(values=-ids.float(), counts=counts)

    async def of_sources(
        rows: TrainingBatch, sources: Sequence[str], count: int, temperature: float
    ) -> tuple[RowTensors, RowTensors]:
        return await likely(rows, count, temperature)

    settings = scene.run.trainer.algorithm.distillation
    teacher = TeacherOfLikelyTokens(settings=settings, teacher=of_sources, policy=likely)
    return plain([column.values for column in asyncio.run(teacher(batch, ["letters"] * len(batch))).extras.values()])


@observable("the servers that score the policy's tokens, and how they are asked")
def asked_servers(scene: Scene) -> object:
    experiment = BasePPOExp(scene.run)
    try:
        servers = {str(source): teacher.server for source, teacher in experiment.served_teachers.items()}
        return {
            source: (server.url, server._protocol, server._timeout, server._connection._most)
            for source, server in servers.items()
        }
    finally:
        experiment.processes.close()


@observable("the steps of four after which the policy is mixed into the teacher, and its share")
def mixtures(scene: Scene) -> object:
    mixed: list[tuple[int, float]] = []
    experiment: Any = BasePPOExp(scene.run)

    class Noted:
        async def mix(self, weights: object, share: float) -> None:
            mixed.append((step, share))

    @asynccontextmanager
    async def stored_policy() -> AsyncIterator[None]:
        yield

    try:
        experiment.local_teachers = {scene.run.trainer.teacher.model.path: Noted()}
        experiment.time_sharing, experiment._stored_policy = TimeSharing({}, None), stored_policy
        for step in range(1, 5):
            asyncio.run(experiment.mix_teacher(step))
        return mixed
    finally:
        experiment.processes.close()


@observable("what the critic learns from a batch: targets, loss and gradient")
def critic_loss(scene: Scene) -> object:
    algorithm, batch = scene.run.trainer.algorithm, small_batch()
    assert batch.values is not None
    objective, targets = ReturnRegression(value_clip=algorithm.value_clip), critic_targets(algorithm)(batch)
    values = (batch.values + torch.cos(batch.input_ids.float())).requires_grad_()
    loss, _, _ = objective(values, objective.weigh(batch.with_fields(returns=targets)))
    loss.backward()
    return plain([targets, loss, values.grad])


@observable("the shaped rewards of a batch, and the KL weight of the next one")
def rewards(scene: Scene) -> object:
    shaping = reward_shaping(scene.run.trainer.algorithm)
    return plain([shaping(small_batch()), shaping.state()])


@observable("the values of the critic after an update")
def learned_values(scene: Scene) -> object:
    experiment = BasePPOExp(scene.run)
    try:
        critic, batch = experiment.get_critic(), small_batch()
        assert critic is not None and batch.values is not None
        asyncio.run(update(critic, batch.with_fields(returns=10 * batch.values + 5), experiment.get_critic_objective()))
        return plain(asyncio.run(critic.score(batch)))
    finally:
        experiment.processes.close()


@observable("the names of the critic's weights")
def critic_weights(scene: Scene) -> object:
    trainer = scene.run.trainer
    worker = CriticWorker(trainer, ReturnRegression(value_clip=trainer.algorithm.value_clip))
    return [name for name, _ in worker.shapes()]


@observable("the log-probabilities that the learner computes", refuses=True)
def logprobs(scene: Scene) -> object:
    trainer = scene.run.trainer
    worker = PolicyWorker(trainer, policy_objective(trainer.algorithm))
    return plain(asyncio.run(worker.score(small_batch())))


@observable("the groups that make a batch, or what is reported where none does")
def filtered(scene: Scene) -> object:
    """At first one of the two groups in each draw teaches, later a little, and in the end both."""
    generator: Any = Scripted([(1.0, 1.0), (1.0, 0.0)], [(1.0, 1.0 - 1e-3), (0.0, 0.0)], [(1.0, 0.5), (0.0, 1.0)])
    prompts = [Prompt(id=str(number), messages=(), token_ids=(number,), env_class="gsm8k") for number in range(6)]
    algorithm, cursor = scene.run.trainer.algorithm, PromptCursor(prompts, 2, seed=0)
    source = SynchronousRollouts(cursor, generator, scene.run.generator, algorithm, seed=7)
    batches: list[object] = []
    try:
        for version in range(3 - len(generator.asked)):
            groups = asyncio.run(source.next_batch(version))
            batches += [(group.rewards, [row.trained for row in group.trajectories]) for group in groups]
            if not generator.batches:
                break
    except (RunError, IndexError) as error:
        batches.append(type(error).__name__)
    return [batches, len(generator.asked)]


def _path(name: str) -> str:
    return name if name.startswith("trainer.") else A + name.replace("__", ".")


def on(probe_of: Observable, context: dict[str, Any], **fields: Any) -> list[Probe]:
    """Probes of fields of `trainer.algorithm` that one observable shows in one context; `__` stands for a dot."""
    where = {_path(name): value for name, value in context.items()}
    named = {_path(name): value for name, value in fields.items()}
    return [Probe(path, value, probe_of, where) for path, value in named.items()]


def loss(name: str, context: Mapping[str, Any] = FrozenDict(), **fields: Any) -> list[Probe]:
    """Probes of a loss's own table."""
    return on(
        policy_loss,
        {"policy_loss_type": name, **context},
        **{f"{name}__{path}": value for path, value in fields.items()},
    )


def correction(context: dict[str, Any], **fields: Any) -> list[Probe]:
    """Probes of the corrections for the gap between engine and learner, in a context of theirs."""
    table = "off_policy_correction__"
    where = {table + name: value for name, value in context.items()}
    return on(policy_loss, where, **{table + name: value for name, value in fields.items()})


def norms(table: str, seen_in: Observable) -> list[Probe]:
    """Probes of a table that shifts and scales by means and deviations."""
    both = {f"{table}__mean_level": "batch", f"{table}__std_level": "group"}
    own = {"mean_leave1out": True, "std_unbiased": False, "eps": 0.5}
    return [
        *on(seen_in, {}, **{f"{table}__mean_level": "batch", f"{table}__std_level": "group"}),
        *on(seen_in, both, **{f"{table}__{path}": value for path, value in own.items()}),
    ]


TWICE = {"trainer.update_epochs_per_batch": 2}
"""A second optimizer step, before which the policy is no longer the old one."""

IN_REWARD = {"use_kl_in_reward": True}
OWN = "tests.effects.own:"
OVERLONG = {"reward_shaping__overlong__buffer_len": 2}
HALF_CUT = {"policy_loss_type": "clip_cov", "clip_cov__clip_ratio": 0.5}
CAPPED = {"policy_loss_type": "decoupled", "decoupled__behav_imp_weight_cap": 1.5}

ADVANTAGES: tuple[Probe, ...] = (
    *on(advantages, {}, advantage_estimator="rloo", grpo_norm_by_std=False, advantage_batch_normalize=True),
    *on(advantages, {"advantage_estimator": f"{OWN}ScaledReturns"}, advantage={"factor": 2.0}),
    *norms("advantage_norm", advantages),
    *on(advantages, {"advantage_estimator": "reinforce++"}, gamma=0.5, whiten_advantages=False),
    Probe(f"{A}lambd", 0.5, advantages, {f"{A}advantage_estimator": "gae", **CRITIC}),
)

TAUGHT: dict[str, Any] = {"trainer.teacher.model.path": "{nano}/model"}
HINTED = {**TAUGHT, "distillation__hint__source": "column"}
IN_LOSS = {**TAUGHT, "distillation__type": "loss"}
ENDPOINT = "trainer.teacher.endpoint."
SERVED: dict[str, Any] = {f"{ENDPOINT}url": "http://10.0.0.5:8000"}
OF_LIKELY = {**IN_LOSS, "distillation__top_k": 4, "distillation__beta": 0.0}

TEACHERS: tuple[Probe, ...] = (
    *on(advantages, TAUGHT, distillation__type="loss", distillation__coef=2.0, distillation__task_coef=0.5),
    *on(advantages, TAUGHT, distillation__discount=0.5),
    *on(advantages, {"distillation__hint__source": "column"}, distillation__self_teacher=True),
    *on(hinted_prompt, TAUGHT, distillation__hint__source="success"),
    *on(hinted_prompt, HINTED, distillation__hint__column="other", distillation__hint__template="{hint}: {prompt}"),
    *on(teacher_costs, IN_LOSS, distillation__beta=0.5, distillation__temperature=2.0),
    *on(teacher_costs, IN_LOSS, distillation__max_divergence=0.5, distillation__top_k=4),
    *on(teacher_costs, OF_LIKELY, distillation__tail=False, distillation__min_logprob=-2.0),
    *on(taught_tokens, OF_LIKELY, distillation__top_k_of="union"),
    *on(mixtures, TAUGHT, distillation__teacher_update_rate=0.5),
    *on(mixtures, {**TAUGHT, "distillation__teacher_update_rate": 0.5}, distillation__teacher_sync_steps=2),
    Probe("trainer.teacher.sources", {"letters": "{nano}/model"}, advantages),
    Probe(f"{ENDPOINT}url", "http://10.0.0.6:8000", asked_servers, SERVED),
    Probe(f"{ENDPOINT}sources", {"letters": "http://10.0.0.6:8000"}, asked_servers, SERVED),
    Probe(f"{ENDPOINT}protocol", "sglang", asked_servers, SERVED),
    Probe(f"{ENDPOINT}timeout", 5.0, asked_servers, SERVED),
    Probe(f"{ENDPOINT}max_requests", 2, asked_servers, SERVED),
)

CRITICS: tuple[Probe, ...] = (
    Probe(f"{A}gamma", 0.5, critic_loss, CRITIC),
    Probe(f"{A}value_clip", 0.5, critic_loss, CRITIC),
    Probe(f"{A}value_head_prefix", "score", critic_weights, CRITIC),
    Probe(f"{A}normalize_values", True, learned_values, CRITIC),
)

LOSSES: tuple[Probe, ...] = (
    *on(policy_loss, {}, policy_loss_type="sapo", loss_reduction="sequence_mean", use_kl_loss=True),
    *on(policy_loss, {"policy_loss_type": f"{OWN}ScaledLoss"}, policy_loss={"factor": 2.0}),
    *on(policy_loss, {"loss_reduction": "seq_mean_token_sum_norm"}, max_seq_len=7),
    *on(policy_loss, {"use_kl_loss": True}, kl_loss_coef=0.5, kl_estimator_type="k1"),
    *on(policy_loss, {}, use_entropy_loss=True),
    *on(policy_loss, TWICE, eps_clip_low=0.5, eps_clip_high=0.5),
    *on(policy_loss, {"use_entropy_loss": True}, entropy_loss_coef=0.5),
    *on(policy_loss, {"policy_loss_type": "dual_clip", **TWICE}, clip_ratio_c=1.5),
    *loss("sapo", tau_pos=2.0, tau_neg=2.0),
    *on(policy_loss, {"policy_loss_type": "clip_cov", "clip_cov__clip_cov_lb": -5.0}, clip_cov__clip_ratio=0.5),
    *on(policy_loss, HALF_CUT, clip_cov__clip_cov_lb=-5.0),
    *on(policy_loss, {**HALF_CUT, "clip_cov__clip_cov_lb": -5.0}, clip_cov__clip_cov_ub=0.0),
    *loss("kl_cov", TWICE, kl_cov_frac=0.5, ppo_kl_coef=0.5),
    *loss("cispo", TWICE, cispo_eps_clip_low=0.1, cispo_eps_clip_high=0.1),
    *loss("cispo", cispo_anchor="rollout"),
    *loss("dppo", dppo_type="binary_kl", delta_low=0.01, delta_high=0.01),
    *loss("gmpo", TWICE, log_clip_low=0.1, log_clip_high=0.1),
    *loss("decoupled", behav_imp_weight_cap=1.5),
    *on(policy_loss, CAPPED, decoupled__cap_mode="clamp"),
    *on(policy_loss, {"policy_loss_type": "decoupled", "clip_ratio_c": 1.1}, decoupled__dual_clip=True),
    *on(ranked, {"policy_loss_type": "online_dpo"}, online_dpo__loss_type="ipo", online_dpo__beta=0.5),
    *on(ranked, {"policy_loss_type": "online_dpo"}, online_dpo__pairs="all"),
)

CORRECTIONS: tuple[Probe, ...] = (
    *on(policy_loss, {}, use_tis=True),
    *on(policy_loss, {"use_tis": True}, tis_imp_ratio_cap=1.5),
    *correction({}, tis_ratio_type="token", sequence_mask_metric="product"),
    *correction({}, outlier_token_is_threshold_low=0.5, outlier_token_is_threshold_high=2.0),
    *correction({}, token_mask_is_threshold_low=0.5, token_mask_is_threshold_high=2.0),
    *correction({"tis_ratio_type": "token"}, token_tis_ratio_clip_high=1.1),
    *correction({"tis_ratio_type": "sequence"}, sequence_tis_ratio_clip_high=1.1),
    *correction({"sequence_mask_metric": "geometric"}, geo_mask_low=0.1, geo_mask_high=10.0),
    *correction({"sequence_mask_metric": "product"}, product_mask_low=0.01, product_mask_high=100.0),
)

REWARDS: tuple[Probe, ...] = (
    *on(rewards, {}, use_kl_in_reward=True, reward_shaping__bias=1.0),
    *on(rewards, {}, reward_shaping__scale=2.0, reward_shaping__clip=0.5),
    *on(rewards, IN_REWARD, kl_loss_coef=0.5, kl_estimator_type="k1", kl_ctrl__type="adaptive"),
    *on(rewards, {**IN_REWARD, "kl_ctrl__type": "adaptive"}, kl_ctrl__kl_target=10.0, kl_ctrl__horizon=100),
    *on(rewards, {}, reward_shaping__overlong__buffer_len=2),
    *on(rewards, OVERLONG, reward_shaping__overlong__penalty_factor=2.0, reward_shaping__overlong__max_len=4),
    *on(rewards, {**OVERLONG, "reward_shaping__overlong__max_len": 3}, reward_shaping__overlong__floor=False),
    *norms("reward_shaping__norm", rewards),
)

GROUPS: tuple[Probe, ...] = (
    *on(filtered, {}, zero_variance_filter=True, dynamic_sampling__type="filter"),
    *on(filtered, {"zero_variance_filter": True}, zero_variance_filter_tol=0.1),
    *on(filtered, {"dynamic_sampling__type": "filter"}, dynamic_sampling__max_sample_batches=1),
    *on(filtered, {"dynamic_sampling__type": "filter"}, dynamic_sampling__min_success_rate=0.75),
    *on(filtered, {"dynamic_sampling__type": "filter"}, dynamic_sampling__max_success_rate=0.25),
    *on(filtered, {"dynamic_sampling__type": "filter"}, dynamic_sampling__min_mean_reward=0.6),
    *on(filtered, {"dynamic_sampling__type": "filter"}, dynamic_sampling__max_mean_reward=0.6),
    *on(filtered, {"dynamic_sampling__type": "filter"}, dynamic_sampling__min_reward_spread=0.1),
    *on(filtered, {"dynamic_sampling__type": "replace"}, dynamic_sampling__min_replace_ratio=0.6),
)

PROBES: tuple[Probe, ...] = (
    *ADVANTAGES,
    *TEACHERS,
    *CRITICS,
    *LOSSES,
    *CORRECTIONS,
    *REWARDS,
    *GROUPS,
    *on(logprobs, {}, temperature=0.5),
)
