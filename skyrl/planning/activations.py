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


def layer_bytes(shape: ModelShape, work: Pass, how: Computing) -> int:
    """Bytes that one layer keeps for backward, without recomputation."""
    cut = (_attention_bytes(shape, how) + _feed_forward_bytes(shape, how)) / how.tensor
    return round(work.tokens * (_norm_bytes(shape, how) + cut)) + _attention_extra(shape, work, how) // how.tensor


def stream_bytes(shape: ModelShape, work: Pass, how: Computing) -> int:
    """Bytes of the input of one layer, which is all that recomputation keeps."""
    return work.tokens * shape.hidden * how.size


def transient_bytes(shape: ModelShape, work: Pass, how: Computing) -> int:
    """Peak bytes that a layer holds temporarily in a pass without gradient: the residual stream, its norm, and three
    inner activations.
    """
    inner = shape.intermediate * max(1, shape.experts_per_token)
    widest = max(3 * inner, 3 * shape.query_width + 4 * shape.key_width)
    return work.tokens * (shape.hidden * (how.size + how.size) + widest * how.size // how.tensor)


def backward_bytes(shape: ModelShape, work: Pass, how: Computing) -> int:
    """Bytes of the gradients of activations that exist at once in the backward pass of a layer."""
    inner = shape.intermediate * max(1, shape.experts_per_token)
    return work.tokens * (2 * inner * how.size // how.tensor + shape.hidden * how.size)


def logits_bytes(shape: ModelShape, tokens: int, how: Computing, *, learns: bool) -> int:
    """Peak bytes of tables of logits, including the gradient of the output matrix if it is accumulated over chunks."""
    vocabulary = shape.vocabulary // how.tensor
    if how.on_gpu and how.tensor == 1:
        return _fused_logits_bytes(shape, tokens, how, learns=learns)
    at_a_time, plain = LOGITS_AT_A_TIME, PLAIN_UP_TO
    if how.on_gpu:
        at_a_time = _logits_of_a_gpu(how)
        plain = max(plain, at_a_time)
    if tokens * vocabulary <= plain:
        return tokens * vocabulary * FLOAT * (TABLES if learns else TABLES - 2)
    chunk = min(tokens, max(at_a_time // vocabulary, 1)) * vocabulary * FLOAT
    weight = vocabulary * shape.hidden * (FLOAT + (how.size if how.size < FLOAT else 0))
    return chunk * CHUNK_TABLES + (weight if learns and how.trains_all else 0)


def _logits_of_a_gpu(how: Computing) -> int:
    """Number of logits in a chunk on a GPU."""
    parts = how.gpu_memory // (FLOAT * SHARE_OF_A_GPU)
    return max(LOGITS_AT_A_TIME, 1 << max(0, parts.bit_length() - 1))


def _fused_logits_bytes(shape: ModelShape, tokens: int, how: Computing, *, learns: bool) -> int:
    """Peak bytes of logits for kernels that read one table in its own type and write the gradient over it."""
    whole = tokens * shape.vocabulary * how.size
    if learns and whole <= how.gpu_memory // KEPT_SHARE_OF_A_GPU:
        return whole
    chunk = min(tokens, max(_logits_of_a_gpu(how) // shape.vocabulary, 1)) * shape.vocabulary * how.size
    weight = shape.vocabulary * shape.hidden * (FLOAT + (how.size if how.size < FLOAT else 0))
    return chunk + (weight if learns and how.trains_all else 0)


def _norm_bytes(shape: ModelShape, how: Computing) -> int:
    """Bytes per token of two norms: input in float32, normalized input, and output, which the products take."""
    if how.precision == "float32":
        return 2 * FLOAT * (3 if how.trains_all else 2) * shape.hidden
    return 2 * (FLOAT + (4 if how.trains_all else 2)) * shape.hidden


def _attention_bytes(shape: ModelShape, how: Computing) -> int:
    """Bytes per token of queries, keys, values and the attention output; norms of heads keep their inputs, too."""
    size = how.size
    kept = (2 * shape.query_width + 2 * shape.key_width) * size
    if shape.head_norms:
        normalized = (FLOAT if size == FLOAT else 2) if how.trains_all else 0
        kept += (shape.query_width + shape.key_width) * (FLOAT + normalized)
    return kept


def _feed_forward_bytes(shape: ModelShape, how: Computing) -> int:
    """Bytes per token of gate, its activation, up, and their product; with experts, for each active expert, plus its
    input and output.
    """
    if not shape.experts:
        return 4 * shape.intermediate * how.size
    each = 5 * shape.intermediate + 3 * shape.hidden
    return each * shape.experts_per_token * how.size


def _attention_extra(shape: ModelShape, work: Pass, how: Computing) -> int:
    """Bytes of copies and masks for packed rows: variable-length kernels gather each prompt's keys for every answer; a
    CPU uses float32 masks and copies the attended keys and values.
    """
    if not work.packed:
        return 0
    length, rows, size = work.prompt + work.answer, work.rows, how.size
    answers = rows * work.answer
    shares = work.prompts < rows
    if how.on_gpu and size < FLOAT:
        return rows * length * 2 * shape.key_width * size // work.sharing if shares else 0
    if not shares:
        return rows * (length * shape.query_width * size + length * length * FLOAT) // work.sharing
    keys = rows * length * 2 * shape.key_width * size
    masks = answers * length * FLOAT
    return (keys + masks + (work.prompts * work.prompt + 2 * answers) * shape.query_width * size) // work.sharing
