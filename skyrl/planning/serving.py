"""Bytes of an inference engine on one of its GPUs: weights, keys and values, and what a step computes with."""

from __future__ import annotations

from attrs import frozen

from skyrl.planning.memory import Bytes
from skyrl.planning.model_shape import ModelShape


@frozen(kw_only=True)
class Serving:
    """One GPU of an engine."""

    shape: ModelShape
    gpus: int = 1
    """GPUs that share the weights: tensor x pipeline."""

    copies: int = 1
    """GPUs that hold the same keys and values, where there are more GPUs than heads of keys."""

    size: int = 2
    """Bytes of a weight, and of a number in the cache."""

    sequences: int
    """Sequences that the engine runs at once, at most."""

    length: int
    """Longest sequence, in tokens."""

    step_tokens: int
    """Tokens that one step computes, at most."""

    budget: int | None = None
    """Bytes that the engine takes in all (`gpu_memory_utilization`); what the rest leaves is cache. None: as much cache
    as its sequences need.
    """

    @property
    def weights(self) -> int:
        """Bytes of the weights on one GPU."""
        return self.shape.parameters * self.size // self.gpus

    @property
    def computing(self) -> int:
        """Bytes of a step at its widest: the feed-forward network over all tokens, or logits of all sequences."""
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
        """Bytes of keys and values; negative where the budget does not hold the weights."""
        if self.budget is None:
            return self.sequences * self.sequence_bytes
        return self.budget - self.weights - self.computing

    @property
    def sequences_of_full_length(self) -> int:
        """Sequences of full length that the cache holds at once."""
        return max(0, min(self.sequences, self.cache // max(1, self.sequence_bytes)))


def serving_memory(serving: Serving) -> Bytes:
    """Parts of an engine while it generates."""
    return {"parameters": serving.weights, "activations": serving.computing, "cache": max(0, serving.cache)}
