"""A teacher beside a learning model: its output matrix, and the divergence from its next-token distributions."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from skyrl.algorithms.linear_divergence import linear_divergence
from skyrl.config.settings.distillation import DistillationConfig
from skyrl.errors import ModelError
from skyrl.models.files.naming import tied_names
from skyrl.models.files.stored_weights import StoredWeights

TYPE = "trainer.algorithm.distillation.type"


class TeacherHead:
    """The output matrix (V, H) of a teacher on a rank of the policy. The teacher's own ranks compute the hidden states
    that it is multiplied with, so that no logits are sent.
    """

    def __init__(self, matrix: Tensor | None, settings: DistillationConfig) -> None:
        """`matrix` is in host memory, in the type of the computation; None: the teacher is the policy, and its matrix
        the policy's own, which gets no gradient from the teacher.
        """
        self._matrix, self._settings = matrix, settings
        self._on_device: Tensor | None = None

    def divergence(self, hidden: Tensor, weight: Tensor, teacher_hidden: Tensor) -> Tensor:
        """(N,) in nats, with gradient: the configured divergence of the student with hidden states (N, H) and output
        matrix (V, H) from the teacher with hidden states (N, H_t).
        """
        matrix = self._of_policy(weight) if self._matrix is None else self._placed(self._matrix, hidden)
        states = teacher_hidden.to(hidden.dtype)
        beta, temperature = self._settings.beta, self._settings.temperature
        return linear_divergence(hidden, weight, states, matrix, beta=beta, temperature=temperature)

    def cost(self, divergence: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Part of the loss of each token, with gradient, and metrics by name; all of them (N,)."""
        numbers, bound = {"teacher_divergence": divergence.detach()}, self._settings.max_divergence
        if bound is not None:
            numbers["teacher_divergence_clamped"] = (divergence.detach() > bound).float()
            divergence = divergence.clamp(max=bound)
        return self._settings.coef * divergence, numbers

    @staticmethod
    def _of_policy(weight: Tensor) -> Tensor:
        return (weight.full_tensor() if isinstance(weight, DTensor) else weight).detach()

    def _placed(self, matrix: Tensor, hidden: Tensor) -> Tensor:
        if self._on_device is None or self._on_device.device != hidden.device:
            self._on_device = matrix.to(hidden.device)
        return self._on_device.to(hidden.dtype)

    def leave_the_device(self) -> None:
        """Free the memory of the device; the next pass copies the matrix there again."""
        self._on_device = None


def stored_output_matrix(meta_model: nn.Module, stored: StoredWeights) -> Tensor:
    """(V, H) float32 in host memory: the output matrix of the stored model, read alone, tied to the embeddings or not.
    `meta_model` is the model without values. Raises `ModelError` if its logits are no product with one matrix.
    """
    find = getattr(meta_model, "get_output_embeddings", None)
    head = find() if find else None
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise no_plain_head(f"the model {stored.path}")
    name = next(f"{path}.weight" for path, module in meta_model.named_modules() if module is head)
    shape = head.weight.shape
    return stored.rows(tied_names(meta_model).get(name, name), range(shape[0]), shape)


def no_plain_head(model: str) -> ModelError:
    """The error of a model whose logits are not the product of hidden states and a matrix."""
    return ModelError(
        f"the logits of {model} are not the product of hidden states and one matrix, which {TYPE} = loss needs: set it "
        "to advantage"
    )
