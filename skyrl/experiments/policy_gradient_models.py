"""The models of a policy-gradient run: the policy, and a reference and a critic if the algorithm has them."""

from __future__ import annotations

from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory

from skyrl.checkpoint.handover import WeightFiles
from skyrl.checkpoint.shards import StoredTensors
from skyrl.config import SkyRLTrainConfig
from skyrl.config.derive.rl_models import has_critic, has_reference
from skyrl.config.derive.sizes import Model, grid_of, replicas_of
from skyrl.experiments.experiment import BaseExp
from skyrl.learners.ranks import Ranks
from skyrl.learners.regression import ReturnRegression
from skyrl.learners.workers.group import LearnerGroup, ScorerGroup
from skyrl.learners.workers.learning_worker import LearningWorker, Objective
from skyrl.learners.workers.model_worker import ModelWorker, token_budget
from skyrl.learners.workers.normalized_critic import NormalizedCritic
from skyrl.learners.workers.roles import CriticWorker, PolicyWorker, RefWorker
from skyrl.runs.read_again import adapter_digests, model_digests
from skyrl.storage.disk import Disk
from skyrl.training.objective import policy_objective


class PolicyGradientModels(BaseExp):
    """An experiment with a policy, a reference and a critic, each on all its ranks; a subclass adds the data."""

    cfg: SkyRLTrainConfig

    @cached_property
    def policy(self) -> LearnerGroup[PolicyWorker]:
        return self.get_policy()

    @cached_property
    def reference(self) -> ScorerGroup[RefWorker] | None:
        return self.get_reference()

    @cached_property
    def critic(self) -> LearnerGroup[CriticWorker] | None:
        return self.get_critic()

    @property
    def learners(self) -> dict[str, LearnerGroup[LearningWorker]]:
        """The models that learn, by name."""
        there: dict[str, LearnerGroup[LearningWorker] | None] = {"policy": self.policy, "critic": self.critic}
        return {name: learner for name, learner in there.items() if learner is not None}

    @property
    def changing(self) -> dict[str, ScorerGroup[ModelWorker]]:
        """The models that a checkpoint holds: those that learn, and the reference if it is refreshed."""
        models: dict[str, ScorerGroup[ModelWorker]] = {**self.learners}
        if self.reference and self.cfg.trainer.update_ref_every_epoch:
            models["ref"] = self.reference
        return models

    def read_again(self) -> dict[str, str]:
        """Digests of what a resumed run reads again, with the models beside the policy: those that no checkpoint holds
        with their weights.
        """
        trainer, found = self.cfg.trainer, super().read_again()
        if has_reference(self.cfg) and not trainer.update_ref_every_epoch:
            ref = trainer.ref.model
            found |= model_digests("trainer.ref.model.path", ref, weights=True)
            found |= adapter_digests("trainer.ref.model.lora.path", ref)
        if has_critic(self.cfg):
            critic = trainer.critic.model
            found |= model_digests("trainer.critic.model.path", critic, weights=bool(critic.lora.rank))
        return found

    def get_policy(self) -> LearnerGroup[PolicyWorker]:
        """The model that learns, on all its ranks."""
        trainer = self.cfg.trainer
        updates = trainer.update_epochs_per_batch * (trainer.train_batch_size // trainer.policy_mini_batch_size)
        makers = [
            partial(PolicyWorker, trainer, self.total_steps * updates, ranks=ranks) for ranks in self._ranks("policy")
        ]
        ranks, replicas = self.processes.start("policy", makers), replicas_of(self.cfg, "policy")
        return LearnerGroup(ranks, token_budget(trainer), replicas=replicas)

    def get_objective(self) -> Objective:
        """Objective that the policy minimizes."""
        trainer = self.cfg.trainer
        return policy_objective(trainer.algorithm, micro_batch_rows=trainer.micro_train_batch_size_per_gpu)

    def get_reference(self) -> ScorerGroup[RefWorker] | None:
        """The model that the KL term measures the distance from, if there is a KL term."""
        if not has_reference(self.cfg):
            return None
        makers = [partial(RefWorker, self.cfg.trainer, ranks=ranks) for ranks in self._ranks("ref")]
        ranks, replicas = self.processes.start("ref", makers), replicas_of(self.cfg, "ref")
        return ScorerGroup(ranks, token_budget(self.cfg.trainer), replicas=replicas)

    def get_critic(self) -> LearnerGroup[CriticWorker] | None:
        """The model that predicts returns, on all its ranks, if there is one."""
        if not has_critic(self.cfg):
            return None
        trainer = self.cfg.trainer
        updates = trainer.update_epochs_per_batch * (trainer.train_batch_size // trainer.critic_mini_batch_size)
        makers = [
            partial(CriticWorker, trainer, self.total_steps * updates, ranks=ranks) for ranks in self._ranks("critic")
        ]
        ranks, replicas = self.processes.start("critic", makers), replicas_of(self.cfg, "critic")
        kind = NormalizedCritic if trainer.algorithm.normalize_values else LearnerGroup[CriticWorker]
        return kind(ranks, token_budget(trainer), replicas=replicas)

    def get_critic_objective(self) -> Objective:
        """Objective that the critic minimizes."""
        return ReturnRegression(value_clip=self.cfg.trainer.algorithm.value_clip)

    async def refresh_reference(self) -> None:
        """Replace the reference, if there is one, with the current policy, into which an adapter is merged."""
        if self.reference is None:
            return
        with TemporaryDirectory(prefix=".reference_", dir=self.folder.path) as scratch:  # all ranks see this folder
            storage = Disk(Path(scratch))
            await self.time_sharing.for_scoring("policy")
            files = await self.policy.stream(WeightFiles(storage=storage, folder="policy"))
            await self.time_sharing.for_scoring("ref")
            await self.reference.load_state(StoredTensors(storage, "policy", files), {})

    def _ranks(self, role: Model) -> tuple[Ranks, ...]:
        return self.ranks_of(role, grid_of(self.cfg, role).ranks, replicas_of(self.cfg, role))
