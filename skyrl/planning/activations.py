"""Bytes that a pass through a decoder-only transformer keeps for backward, and bytes that it holds temporarily.

Counted for the layers of transformers' Llama, Qwen2 and Qwen3, tensor by tensor, in two precisions: float32, and 16
bits throughout.
"""

from __future__ import annotations

from typing import Literal

from attrs import frozen

from skyrl.planning.model_shape import ModelShape

Precision = Literal["float32", "bfloat16"]

FLOAT = 4
LOGITS_AT_A_TIME = 2**25
"""Number of logits in a chunk on a CPU, if the table of logits is too large to be kept whole: `linear_logprobs`."""

PLAIN_UP_TO = 2**26
"""Largest number of logits for which the table is kept whole on a CPU."""

SHARE_OF_A_GPU = 64
"""A chunk of logits takes 1 / `SHARE_OF_A_GPU` of a GPU's memory."""

KEPT_SHARE_OF_A_GPU = 16
"""A table of logits is kept for backward if it takes at most 1 / `KEPT_SHARE_OF_A_GPU` of a GPU's memory."""

TABLES = 5
"""Tables of logits that exist at once when log-probabilities and the entropy are computed from a whole table."""

CHUNK_TABLES = 3
"""Tables of logits that exist at once when log-probabilities and the entropy are computed from a chunk."""


@frozen(kw_only=True)
class Pass:
    """The tokens of one micro-batch on one rank."""

    rows: int
    prompt: int
    answer: int
    packed: bool
    shares_prompts: bool = False
    samples: int = 1
    """Number of consecutive rows with the same prompt."""

    sharing: int = 1
    """Number of ranks that share each row, each computing a part of its tokens."""

    @property
    def prompts(self) -> int:
        """Number of prompt copies that are computed."""
        return -(-self.rows // self.samples) if self.packed and self.shares_prompts else self.rows

    @property
    def tokens(self) -> int:
        """Number of tokens that this rank computes."""
        return -(-(self.prompts * self.prompt + self.rows * self.answer) // self.sharing)

    @property
    def read(self) -> int:
        """Number of tokens whose logits are used."""
        return -(-self.rows * self.answer // self.sharing)


@frozen(kw_only=True)
class Computing:
    """Precision, adapters, sharding and device with which a model computes."""

    precision: Precision
    trains_all: bool = True
    """False if only adapters are trained: fewer of a layer's inputs are kept."""

    tensor: int = 1
    """Number of tensor-parallel ranks, which split matrices, heads and the vocabulary."""

    on_gpu: bool = False
    gpu_memory: int = 0
    """Bytes of GPU memory, which determine the size of a chunk of logits."""

    @property
    def size(self) -> int:
        """Bytes per number in matrix products and between layers."""
        return FLOAT if self.precision == "float32" else 2


def layer_bytes(shape: ModelShape, work: Pass, computing: Computing) -> int:
    """Bytes that one layer keeps for backward, without recomputation."""
    size, trains_all, widths = computing.size, computing.trains_all, shape.query_width + shape.key_width
    # Two norms: input in float32, normalized input, and output, which the products take.
    if computing.precision == "float32":
        norms = 2 * FLOAT * (3 if trains_all else 2) * shape.hidden
    else:
        norms = 2 * (FLOAT + (4 if trains_all else 2)) * shape.hidden
    # Queries, keys, values and the attention output; norms of heads keep their inputs, too.
    attention = 2 * widths * size
    if shape.head_norms:
        attention += widths * (FLOAT + ((FLOAT if size == FLOAT else 2) if trains_all else 0))
    # Gate, its activation, up, and their product; with experts, for each active expert, plus its input and output.
    feed_forward = 4 * shape.intermediate * size
    if shape.experts:
        feed_forward = (5 * shape.intermediate + 3 * shape.hidden) * shape.experts_per_token * size
    kept = round(work.tokens * (norms + (attention + feed_forward) / computing.tensor))
    return kept + _attention_extra(shape, work, computing) // computing.tensor


def stream_bytes(shape: ModelShape, work: Pass, computing: Computing) -> int:
    """Bytes of the input of one layer, which is all that recomputation keeps."""
    return work.tokens * shape.hidden * computing.size


def transient_bytes(shape: ModelShape, work: Pass, computing: Computing) -> int:
    """Peak bytes that a layer holds temporarily in a pass without gradient: the residual stream, its norm, and three
    inner activations.
    """
    inner = shape.intermediate * max(1, shape.experts_per_token)
    widest = max(3 * inner, 3 * shape.query_width + 4 * shape.key_width)
    return work.tokens * (2 * shape.hidden * computing.size + widest * computing.size // computing.tensor)


def backward_bytes(shape: ModelShape, work: Pass, computing: Computing) -> int:
    """Bytes of the gradients of activations that exist at once in the backward pass of a layer."""
    inner = shape.intermediate * max(1, shape.experts_per_token)
    return work.tokens * (2 * inner * computing.size // computing.tensor + shape.hidden * computing.size)


def logits_bytes(shape: ModelShape, tokens: int, computing: Computing, *, learns: bool) -> int:
    """Peak bytes of tables of logits, including the gradient of the output matrix if it is accumulated over chunks."""
    vocabulary, size = shape.vocabulary // computing.tensor, computing.size
    weight = 0
    if learns and computing.trains_all:
        weight = vocabulary * shape.hidden * (FLOAT + (size if size < FLOAT else 0))
    if computing.on_gpu and computing.tensor == 1:
        # Fused kernels read one table in its own type, and write the gradient over it.
        whole = tokens * vocabulary * size
        if learns and whole <= computing.gpu_memory // KEPT_SHARE_OF_A_GPU:
            return whole
        return min(tokens, max(_logits_of_a_gpu(computing) // vocabulary, 1)) * vocabulary * size + weight
    at_a_time, plain = LOGITS_AT_A_TIME, PLAIN_UP_TO
    if computing.on_gpu:
        at_a_time = _logits_of_a_gpu(computing)
        plain = max(plain, at_a_time)
    if tokens * vocabulary <= plain:
        return tokens * vocabulary * FLOAT * (TABLES if learns else TABLES - 2)
    chunk = min(tokens, max(at_a_time // vocabulary, 1)) * vocabulary * FLOAT
    return chunk * CHUNK_TABLES + weight


def _logits_of_a_gpu(computing: Computing) -> int:
    """Number of logits in a chunk on a GPU."""
    parts = computing.gpu_memory // (FLOAT * SHARE_OF_A_GPU)
    return max(LOGITS_AT_A_TIME, 1 << max(0, parts.bit_length() - 1))


def _attention_extra(shape: ModelShape, work: Pass, computing: Computing) -> int:
    """Bytes of copies and masks for packed rows: variable-length kernels gather each prompt's keys for every answer; a
    CPU uses float32 masks and copies the attended keys and values.
    """
    if not work.packed:
        return 0
    length, rows, size = work.prompt + work.answer, work.rows, computing.size
    answers = rows * work.answer
    shares = work.prompts < rows
    if computing.on_gpu and size < FLOAT:
        return rows * length * 2 * shape.key_width * size // work.sharing if shares else 0
    if not shares:
        return rows * (length * shape.query_width * size + length * length * FLOAT) // work.sharing
    keys = rows * length * 2 * shape.key_width * size
    masks = answers * length * FLOAT
    return (keys + masks + (work.prompts * work.prompt + 2 * answers) * shape.query_width * size) // work.sharing
