"""Passes on the wire: a protobuf body becomes a `PassRequest`, a `PassResult` becomes a protobuf body."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import frozen
from google.protobuf.message import DecodeError, Message
from numpy.typing import NDArray

from skyrl.errors import RequestError
from skyrl.training_service.backend import Array, Datum, PassRequest, PassResult
from skyrl.training_service.messages import BFLOAT16, FLOAT32, INT32, INT64, new_message, parsed_pass

if TYPE_CHECKING:
    from skyrl.training_service.messages import CsrMessage, DatumMessage, PassMessage, TensorMessage

MOST_ELEMENTS = 1 << 26
"""Maximum number of elements of all arrays of a request, of which a sparse one takes few bytes of its body."""

_LONGEST_ADDRESS = 512
"""Number of bytes in which a model's name and a request's number have to be."""

_STORED: Mapping[int, np.dtype[Any]] = {
    FLOAT32: np.dtype("<f4"),
    INT64: np.dtype("<i8"),
    INT32: np.dtype("<i4"),
    BFLOAT16: np.dtype("<u2"),
}
"""Elements of an array, as the wire holds them."""


_NO_TEXT = {"image": "an image", "dmel": "audio"}
"""Chunks of an input that are no text, in words."""


@frozen(kw_only=True)
class PassLimits:
    """Bounds on the sequences of one request."""

    datums: int
    context: int
    vocabulary: int


def address_of(body: bytes) -> tuple[str, int, int]:
    """Model, number and tokens of a pass. Raises `RequestError` for a body that is no such message."""
    message = _message(body)
    tokens = sum(len(chunk.encoded_text.tokens) // 4 for datum in message.data for chunk in datum.model_input)
    return message.model_id, message.seq_id, tokens


def address_of_start(start: bytes) -> tuple[str, int, int]:
    """Model and number of a pass that is too long to be read, from its first bytes: these two fields come first. Raises
    `RequestError` if they do not.
    """
    for end in range(min(len(start), _LONGEST_ADDRESS)):
        with suppress(DecodeError):
            if (message := parsed_pass(start[:end])).seq_id:
                return message.model_id, message.seq_id, 0
    raise RequestError("the body is too long", status=413)


def pass_request(body: bytes, limits: PassLimits) -> PassRequest:
    """The pass in a body. Raises `RequestError`, which names the field."""
    message = _message(body)
    if not 1 <= len(message.data) <= limits.datums:
        raise RequestError(f"data has {len(message.data)} sequences; allowed are 1 to {limits.datums}", param="data")
    data, budget = [], _Budget()
    for index, datum in enumerate(message.data):
        tokens = _tokens(datum, f"data[{index}].model_input", limits)
        inputs = {
            name: _array(tensor, f"data[{index}].loss_fn_inputs.{name[:80]}", len(tokens), budget)
            for name, tensor in datum.loss_fn_inputs.items()
        }
        data.append(Datum(tokens=tokens, inputs=inputs))
    return PassRequest(
        model_id=message.model_id,
        data=tuple(data),
        loss=message.loss_fn,
        loss_config=_loss_config(message),
        backward=not message.forward_only,
    )


def pass_body(result: PassResult) -> bytes:
    """The answer to a pass."""
    # A record has one shape: outputs whose arrays have the same names, and the same numbers K of columns.
    shapes = lambda output: {name: array.shape[1:] for name, array in output.items()}  # noqa: E731  # a key, used once
    records = []
    for _, run in itertools.groupby(result.outputs, key=shapes):
        outputs = list(run)
        fields = {name: _batched([output[name] for output in outputs]) for name in outputs[0]}
        records.append(new_message("ArrayRecord", type_tag="ArrayRecord", num_datums=len(outputs), fields=fields))
    message = new_message(
        "ForwardBackwardOutput",
        loss_fn_output_type="ArrayRecord",
        loss_fn_outputs=records,
        metrics=dict(result.metrics),
    )
    return message.SerializeToString()


class _Budget:
    """Number of elements that a request may still have."""

    def __init__(self) -> None:
        self._left = MOST_ELEMENTS

    def take(self, shape: Sequence[int], name: str) -> None:
        self._left -= math.prod(shape)
        if self._left < 0:
            raise RequestError(f"{name}: the arrays of a request have at most {MOST_ELEMENTS} elements", param=name)


def _message(body: bytes) -> PassMessage:
    try:
        return parsed_pass(body)
    except DecodeError as error:
        raise RequestError("the body is not a ForwardBackwardRequest in protobuf") from error


def _loss_config(message: PassMessage) -> Mapping[str, float]:
    """Settings of the loss. Clients send numbers in two maps, the newer of which also holds texts."""
    for name, value in message.loss_fn_config_v2.items():
        if value.text:
            raise RequestError(
                f"loss_fn_config.{name[:80]} = {value.text[:80]!r}: the losses here have no text settings"
            )
    values = {name: value.number for name, value in message.loss_fn_config_v2.items()} or dict(message.loss_fn_config)
    for name, number in values.items():
        if not math.isfinite(number):
            raise RequestError(f"loss_fn_config.{name[:80]} has to be a finite number, not {number}")
    return values


def _tokens(datum: DatumMessage, name: str, limits: PassLimits) -> NDArray[np.int64]:
    parts = []
    for chunk in datum.model_input:
        if not chunk.HasField("encoded_text"):
            kind = next(
                (description for kind, description in _NO_TEXT.items() if chunk.HasField(kind)), "a chunk of this kind"
            )
            raise RequestError(f"{name}: {kind} is not supported: the model reads text", param=name)
        parts.append(_elements(chunk.encoded_text.tokens, np.dtype("<i4"), name))
    tokens = np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)
    if not 1 <= len(tokens) <= limits.context:
        raise RequestError(f"{name} has {len(tokens)} tokens; allowed are 1 to {limits.context}", param=name)
    wrong = (tokens < 0) | (tokens >= limits.vocabulary)
    if wrong.any():
        first = int(wrong.argmax())
        raise RequestError(
            f"{name}: token {tokens[first]} at place {first} is not in the vocabulary of {limits.vocabulary}",
            param=name,
        )
    return tokens


def _array(tensor: TensorMessage, name: str, length: int, budget: _Budget) -> Array:
    """An array (T,) or (T, K) of a datum of T tokens, in float32 or int64."""
    stored = _STORED.get(tensor.dtype)
    if stored is None:
        raise RequestError(f"{name}: {tensor.dtype} is not a known dtype", param=name)
    sparse = tensor.HasField("sparse_csr")
    values = _elements(tensor.sparse_csr.values if sparse else tensor.dense, stored, name)
    shape = tuple(tensor.shape) or (len(values),)
    if len(shape) not in (1, 2) or shape[0] != length or min(shape) < 0:
        raise RequestError(
            f"{name} has the shape {list(shape)[:8]}; needed is one number, or one row of numbers, per token: "
            f"[{length}] or [{length}, K]",
            param=name,
        )
    budget.take(shape, name)
    if sparse:
        values = _dense(tensor.sparse_csr, values, shape, name)
    if math.prod(shape) != values.size:
        raise RequestError(f"{name} has {values.size} elements, which is not the shape {list(shape)}", param=name)
    if tensor.dtype == BFLOAT16:
        values = (values.astype(np.uint32) << 16).view(np.float32)
    array = values.astype(np.float32 if tensor.dtype in (FLOAT32, BFLOAT16) else np.int64).reshape(shape)
    if np.isnan(array).any():
        raise RequestError(f"{name} contains NaN", param=name)
    return array


def _dense(csr: CsrMessage, values: Array, shape: tuple[int, ...], name: str) -> Array:
    """The matrix whose row r holds `values[crow[r] : crow[r + 1]]` in the columns that are given for them."""
    crow = _elements(csr.crow_indices, np.dtype("<i8"), f"{name}.crow_indices").astype(np.int64)
    columns = _elements(csr.col_indices, np.dtype("<i8"), f"{name}.col_indices").astype(np.int64)
    rows = (np.diff(crow) >= 0).all() and len(crow) == shape[0] + 1 and crow[0] == 0 and crow[-1] == len(values)
    inside = len(columns) == len(values) and ((columns >= 0) & (columns < shape[-1])).all()
    if len(shape) != 2 or not rows or not inside:
        raise RequestError(f"{name}: its rows and columns do not describe a matrix {list(shape)}", param=name)
    dense = np.zeros(shape, values.dtype)
    dense[np.repeat(np.arange(shape[0]), np.diff(crow)), columns] = values
    return dense


def _elements(content: bytes, kind: np.dtype[Any], name: str) -> Array:
    if len(content) % kind.itemsize:
        raise RequestError(f"{name} has {len(content)} bytes, which are no elements of {kind.itemsize}", param=name)
    return np.frombuffer(content, kind)


def _batched(arrays: Sequence[Array]) -> Message:
    stored = [np.ascontiguousarray(array, np.dtype("<f4")) for array in arrays]
    offsets = np.cumsum([0, *(array.nbytes for array in stored)]).astype("<i8")
    return new_message(
        "BatchedTensor",
        data=b"".join(array.tobytes() for array in stored),
        offsets=offsets.tobytes(),
        dtype=FLOAT32,
        trailing_shape=stored[0].shape[1:],
    )
