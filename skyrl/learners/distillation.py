"""Teachers beside a learning model: the divergence from their next-token distributions, whole or of a few tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from skyrl.algorithms.linear_divergence import linear_divergence
from skyrl.algorithms.target_logprobs import target_logprobs
from skyrl.algorithms.topk_divergence import ABSENT, topk_divergence
from skyrl.batch import TEACHER_IDS, TEACHER_LOGPROBS, RowTensors, TrainingBatch, to_device
from skyrl.config.settings.distillation import DivergenceConfig
from skyrl.errors import ModelError
from skyrl.learners.row_layouts import RowLayout
from skyrl.models.files.naming import tied_names
from skyrl.models.files.stored_weights import StoredWeights
from skyrl.models.output_head import output_embeddings


class TeacherLoss:
    """The divergence of a learning model from its teachers, at the tokens of rows that carry what teachers said."""

    def __init__(
        self,
        settings: DivergenceConfig,
        matrices: Mapping[str, Tensor] | None = None,
        *,
        of_policy: Collection[str] = (),
    ) -> None:
        """`matrices` are the output matrices (V, H) of teachers whose whole distributions are compared, by the name of
        the extras with their hidden states; in host memory, in the type of the computation. The teachers' own ranks
        compute the hidden states, so that no logits are sent. The teachers `of_policy` have the learning model's
        matrix, which gets no gradient from them.
        """
        self._settings, self._matrices = settings, dict(matrices or {})
        self._names = (*self._matrices, *of_policy)
        self._on_device: dict[str, Tensor] = {}

    def reads(self, batch: TrainingBatch) -> bool:
        """Whether rows of the batch carry what teachers said."""
        return not batch.extras.keys().isdisjoint({TEACHER_IDS, *self._names})

    def columns(self, hidden: Tensor, weight: Tensor, batch: TrainingBatch, layout: RowLayout) -> list[Tensor]:
        """What `cost` is computed from, (n,) each with gradient, at the tokens that this rank reads: `hidden` (n, H)
        are their hidden states, `weight` (V, H) is the output matrix.
        """
        if TEACHER_IDS in batch.extras:
            ids = _ids(batch, layout, weight.shape[0])
            logs = target_logprobs(hidden, weight, ids.clamp(min=0), temperature=self._settings.temperature)
            return self._divergence_at_tokens(logs, ids, batch, layout)
        carried = {name: batch.extras[name] for name in self._names if name in batch.extras}
        if len(carried) == 1:
            [(name, rows)] = carried.items()
            return [self._full_divergence(name, hidden, weight, layout.local(rows.values))]
        divergence = torch.zeros(len(hidden), device=hidden.device)
        for name, (positions, states) in _states_by_teacher(carried, layout).items():
            divergence = divergence.index_copy(
                0, positions, self._full_divergence(name, hidden[positions], weight, states)
            )
        return [divergence]

    def columns_of_logits(self, logits: Tensor, batch: TrainingBatch, layout: RowLayout) -> list[Tensor]:
        """`columns` from a table of logits (n, V), for models whose logits are no plain product. Rows must carry
        log-probabilities.
        """
        ids = _ids(batch, layout, logits.shape[1])
        logits = logits.float() / self._settings.temperature
        logs = logits.gather(-1, ids.clamp(min=0)) - logits.logsumexp(-1, keepdim=True)
        return self._divergence_at_tokens(logs, ids, batch, layout)

    def cost(self, columns: Sequence[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Part of the loss of each token, with gradient, and metrics by name, from the columns of all N tokens."""
        divergence, *clamped = columns
        numbers, bound = {"teacher_divergence": divergence.detach()}, self._settings.max_divergence
        if clamped and self._settings.min_logprob is not None:
            numbers["teacher_logprobs_clamped"] = clamped[0].detach()
        if bound is not None:
            numbers["teacher_divergence_clamped"] = (divergence.detach() > bound).float()
            divergence = divergence.clamp(max=bound)
        return self._settings.coef * divergence, numbers

    def leave_the_device(self) -> None:
        """Free the memory of the device; the next pass copies the matrices there again."""
        self._on_device.clear()

    def _divergence_at_tokens(self, logs: Tensor, ids: Tensor, batch: TrainingBatch, layout: RowLayout) -> list[Tensor]:
        settings, teacher_logprobs = self._settings, layout.local(batch.extras[TEACHER_LOGPROBS].values)
        return list(
            topk_divergence(
                logs, teacher_logprobs, ids, beta=settings.beta, tail=settings.tail, min_logprob=settings.min_logprob
            )
        )

    def _matrix(self, name: str, weight: Tensor) -> Tensor:
        """(V, H): the output matrix of a teacher, on the device of the learning model's own."""
        if name not in self._matrices:
            return (weight.full_tensor() if isinstance(weight, DTensor) else weight).detach()
        matrix = self._on_device.get(name)
        if matrix is None or matrix.device != weight.device:
            matrix = self._on_device[name] = self._matrices[name].to(weight.device)
        return matrix

    def _full_divergence(self, name: str, hidden: Tensor, weight: Tensor, states: Tensor) -> Tensor:
        """(n,) in nats: the divergence of whole distributions from those of a teacher with hidden states (n, H_t)."""
        teacher_weight, states = self._matrix(name, weight).to(hidden.dtype), states.to(hidden.dtype)
        beta, temperature = self._settings.beta, self._settings.temperature
        return linear_divergence(hidden, weight, states, teacher_weight, beta=beta, temperature=temperature)


def _ids(batch: TrainingBatch, layout: RowLayout, vocabulary: int) -> Tensor:
    """(n, K) int64: the tokens that are compared at the tokens that this rank reads. Rows with which a teacher's output
    matrix is padded beyond the model's `vocabulary` do not count.
    """
    ids = layout.local(batch.extras[TEACHER_IDS].values).long()
    return ids.masked_fill(ids >= vocabulary, ABSENT)


def _states_by_teacher(carried: Mapping[str, RowTensors], layout: RowLayout) -> dict[str, tuple[Tensor, Tensor]]:
    """For each teacher the places, among the n tokens that this rank reads, of the tokens of its rows, and its states
    there. Each row carries the states of one teacher.
    """
    counts = torch.stack([item.counts for item in carried.values()])  # (teachers, B), on the host
    tokens = counts.sum(0)
    teacher_of = counts.argmax(0).repeat_interleave(tokens)
    device = next(iter(carried.values())).values.device
    states_by_teacher = {}
    for number, (name, states) in enumerate(carried.items()):
        entry = (teacher_of == number).long().cumsum(0) - 1  # of each token, among those of this teacher
        entry = torch.where(teacher_of == number, entry, -1)
        if layout.stretch is not None:  # only the device knows which tokens this rank reads
            entry = layout.local(to_device(entry, device)).cpu()
        positions = (entry >= 0).nonzero().squeeze(1)
        states_by_teacher[name] = (to_device(positions, device), states.values[to_device(entry[positions], device)])
    return states_by_teacher


def stored_output_matrix(meta_model: nn.Module, stored: StoredWeights) -> Tensor:
    """(V, H) float32 in host memory: the output matrix of the stored model, read alone, tied to the embeddings or not.
    `meta_model` is the model without values. Raises `ModelError` if its logits are no product with one matrix.
    """
    head = output_embeddings(meta_model)
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise no_plain_head(f"the model {stored.path}")
    name = next(f"{path}.weight" for path, module in meta_model.named_modules() if module is head)
    shape = head.weight.shape
    return stored.rows(tied_names(meta_model).get(name, name), range(shape[0]), shape)


def no_plain_head(model: str) -> ModelError:
    """The error of a model whose logits are not the product of hidden states and a matrix."""
    return ModelError(
        f"the logits of {model} are not the product of hidden states and one matrix, which the divergence over all "
        "tokens needs: set distillation.top_k = 128 (or in reinforcement learning distillation.type = advantage)"
    )
