"""Bytes of an inference engine on one of its GPUs: weights, keys and values, and temporary buffers of a step."""

from __future__ import annotations

from attrs import frozen

from skyrl.planning.memory import Bytes
from skyrl.planning.model_shape import ModelShape


@frozen(kw_only=True)
class Serving:
    """One GPU of an engine."""

    shape: ModelShape
    gpus: int = 1
    """Number of GPUs that share the weights: tensor x pipeline."""

    copies: int = 1
    """Number of GPUs that hold the same keys and values; above 1 if there are more GPUs than key heads."""

    size: int = 2
    """Bytes per weight, and per number in the cache."""

    sequences: int
    """Largest number of sequences that the engine runs at once."""

    length: int
    """Longest sequence, in tokens."""

    step_tokens: int
    """Largest number of tokens that one step computes."""

    budget: int | None = None
    """Total bytes that the engine takes (`gpu_memory_utilization`), of which the cache gets what the other parts leave.
    None: the cache is as large as its sequences need.
    """

    @property
    def weights(self) -> int:
        """Bytes of the weights on one GPU."""
        return self.shape.parameters * self.size // self.gpus

    @property
    def computing(self) -> int:
        """Peak bytes of a step: the feed-forward network over all tokens, or the logits of all sequences."""
        shape = self.shape
        inner = shape.intermediate * max(1, shape.experts_per_token)
        tokens = self.step_tokens * (3 * shape.hidden + 3 * inner // self.gpus) * self.size
        return max(tokens, min(self.sequences, self.step_tokens) * shape.vocabulary * 4 * 2 // self.gpus)

    @property
    def token_bytes(self) -> float:
        """Bytes of keys and values of one token on one GPU."""
        return self.shape.cache_bytes_per_token(self.size) * self.copies / self.gpus

    @property
    def sequence_bytes(self) -> int:
        """Bytes of keys and values of one sequence of full length."""
        return round(self.token_bytes * self.length)

    @property
    def cache(self) -> int:
        """Bytes of keys and values; negative if the weights do not fit in the budget."""
        if self.budget is None:
            return self.sequences * self.sequence_bytes
        return self.budget - self.weights - self.computing

    @property
    def sequences_of_full_length(self) -> int:
        """Number of sequences of full length that the cache holds at once."""
        return max(0, min(self.sequences, self.cache // max(1, self.sequence_bytes)))


def serving_memory(serving: Serving) -> Bytes:
    """Bytes of an engine's parts while it generates."""
    return {"parameters": serving.weights, "activations": serving.computing, "cache": max(0, serving.cache)}
