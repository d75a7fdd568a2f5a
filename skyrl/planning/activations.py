"""Bytes that a pass through a decoder-only transformer keeps for backward, and that it holds for a moment.

Counted for the layers of transformers' Llama, Qwen2 and Qwen3, tensor by tensor, in three ways of computing: float32;
16 bits throughout, as where weights are gathered in 16 bits; and autocast, which keeps the residual stream in float32
and casts the input of every product anew.
"""

from __future__ import annotations

from typing import Literal

from attrs import frozen

from skyrl.planning.model_shape import ModelShape

Precision = Literal["float32", "bfloat16", "autocast"]

FLOAT = 4
LOGITS_AT_A_TIME = 2**25
"""Logits of a chunk of tokens on a CPU, above which a table of logits is not kept whole: `linear_logprobs`."""

PLAIN_UP_TO = 2**26
"""Logits up to which the table is kept whole on a CPU."""

SHARE_OF_A_GPU = 64
"""A chunk of logits takes one of so many parts of a GPU's memory."""

TABLES = 5
"""Tables of logits that exist at once where log-probabilities and the entropy are read from a whole table."""

CHUNK_TABLES = 3
"""The same of a chunk."""


@frozen(kw_only=True)
class Pass:
    """The tokens of one micro-batch on one rank."""

    rows: int
    prompt: int
    answer: int
    packed: bool
    shares_prompts: bool = False
    samples: int = 1
    """Rows in a row that have the same prompt."""

    sharing: int = 1
    """Ranks that compute a stretch of the row each."""

    @property
    def prompts(self) -> int:
        """Copies of prompts that are computed."""
        return -(-self.rows // self.samples) if self.packed and self.shares_prompts else self.rows

    @property
    def tokens(self) -> int:
        """Tokens that this rank computes."""
        return -(-(self.prompts * self.prompt + self.rows * self.answer) // self.sharing)

    @property
    def read(self) -> int:
        """Tokens whose distribution is read."""
        return -(-self.rows * self.answer // self.sharing)


@frozen(kw_only=True)
class Computing:
    """How a model computes."""

    precision: Precision
    trains_all: bool = True
    """False where adapters alone are trained: less of a layer's inputs is kept."""

    tensor: int = 1
    """Ranks that cut matrices, heads and the vocabulary among them."""

    on_gpu: bool = False
    gpu_memory: int = 0
    """Bytes of the GPU, by which the size of a chunk of logits is chosen."""

    @property
    def size(self) -> int:
        """Bytes of a number in the products of matrices."""
        return FLOAT if self.precision == "float32" else 2

    @property
    def residual_size(self) -> int:
        """Bytes of a number between layers."""
        return 2 if self.precision == "bfloat16" else FLOAT


def layer_bytes(shape: ModelShape, work: Pass, how: Computing) -> int:
    """Bytes that one layer keeps for backward, without recomputation."""
    cut = (_attention_bytes(shape, how) + _feed_forward_bytes(shape, how)) / how.tensor
    return round(work.tokens * (_norm_bytes(shape, how) + cut)) + _attention_extra(shape, work, how) // how.tensor


def stream_bytes(shape: ModelShape, work: Pass, how: Computing) -> int:
    """Bytes of the input of one layer: all that recomputation keeps of it."""
    return work.tokens * shape.hidden * how.residual_size


def transient_bytes(shape: ModelShape, work: Pass, how: Computing) -> int:
    """Bytes that a layer holds for a moment in a pass without gradient, at its widest place: the residual stream, its
    norm, and three inner products.
    """
    inner = shape.intermediate * max(1, shape.experts_per_token)
    widest = max(3 * inner, 3 * shape.query_width + 4 * shape.key_width)
    return work.tokens * (shape.hidden * (how.residual_size + how.size) + widest * how.size // how.tensor)


def backward_bytes(shape: ModelShape, work: Pass, how: Computing) -> int:
    """Bytes of the gradients of activations that exist at once in the backward pass of a layer."""
    inner = shape.intermediate * max(1, shape.experts_per_token)
    return work.tokens * (2 * inner * how.size // how.tensor + shape.hidden * how.residual_size)


def logits_bytes(shape: ModelShape, tokens: int, how: Computing, *, learns: bool) -> int:
    """Bytes of tables of logits at their peak, with the gradient of the output matrix where chunks add it up."""
    vocabulary = shape.vocabulary // how.tensor
    at_a_time, plain = LOGITS_AT_A_TIME, PLAIN_UP_TO
    if how.on_gpu:
        parts = how.gpu_memory // (FLOAT * SHARE_OF_A_GPU)
        at_a_time = max(at_a_time, 1 << max(0, parts.bit_length() - 1))
        plain = max(plain, at_a_time)
    if tokens * vocabulary <= plain:
        return tokens * vocabulary * FLOAT * (TABLES if learns else TABLES - 2)
    chunk = min(tokens, max(at_a_time // vocabulary, 1)) * vocabulary * FLOAT
    weight = vocabulary * shape.hidden * (FLOAT + (how.size if how.size < FLOAT else 0))
    return chunk * CHUNK_TABLES + (weight if learns and how.trains_all else 0)


def _norm_bytes(shape: ModelShape, how: Computing) -> int:
    """Two norms: input in float32, the normalized one, and their output, which the products take."""
    match how.precision:
        case "float32":
            kept = 3 * FLOAT if how.trains_all else 2 * FLOAT
            return 2 * kept * shape.hidden
        case "bfloat16":
            kept = FLOAT + (4 if how.trains_all else 2)
            return 2 * kept * shape.hidden
        case "autocast":  # query, key and value, gate and up each cast the output for themselves
            kept = 2 * FLOAT if how.trains_all else FLOAT
            return (2 * kept + 5 * 2) * shape.hidden


def _attention_bytes(shape: ModelShape, how: Computing) -> int:
    """Queries, keys, values and the mixed values; norms of heads keep their inputs, too."""
    size = how.size
    kept = (2 * shape.query_width + 2 * shape.key_width) * size
    if shape.head_norms:
        normalized = (FLOAT if size == FLOAT else 2) if how.trains_all else 0
        kept += (shape.query_width + shape.key_width) * (FLOAT + normalized)
    return kept


def _feed_forward_bytes(shape: ModelShape, how: Computing) -> int:
    """Gate, its activation, up, and their product; of each expert that a token meets, with its input and output."""
    if not shape.experts:
        return 4 * shape.intermediate * how.size
    each = 5 * shape.intermediate + 3 * shape.hidden
    return each * shape.experts_per_token * how.size


def _attention_extra(shape: ModelShape, work: Pass, how: Computing) -> int:
    """Copies and masks of packed rows: kernels for sequences of any length gather each prompt's keys for every answer;
    a CPU masks, in float32, and copies what it attends to.
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
