"""Protobuf messages of the Tinker client, version 0.38: passes, their outputs, and samples.

Field numbers and types are the client's. The package has a name of its own, so that a process can also import the
client. Fields that no server has to read, such as provenance spans, are left out: protobuf skips them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

FLOAT32, INT64, INT32, BFLOAT16 = 1, 2, 3, 4
"""Numbers of the element types."""

STOPPED, LENGTH = 0, 1
"""Numbers of the reasons why a sample ended."""

_PACKAGE = "skyrl_training_service"

_MESSAGES = {
    "EncodedText": ("bytes tokens 1",),
    "Image": ("bytes data 1", "string format 2"),
    "Dmel": ("bytes dmel 1",),
    "Chunk": ("EncodedText encoded_text 1", "Image image 2", "Dmel dmel 3"),
    "SparseCsr": ("bytes values 1", "bytes crow_indices 2", "bytes col_indices 3"),
    "Tensor": ("bytes dense 1", "SparseCsr sparse_csr 2", "int32 dtype 3", "repeated int64 shape 4"),
    "Datum": ("repeated Chunk model_input 1", "map Tensor loss_fn_inputs 2"),
    "LossConfigValue": ("double number 1", "string text 2"),
    "ForwardBackwardRequest": (
        "string model_id 1",
        "int32 seq_id 2",
        "repeated Datum data 3",
        "string loss_fn 4",
        "map double loss_fn_config 5",
        "bool forward_only 6",
        "map LossConfigValue loss_fn_config_v2 7",
    ),
    "BatchedTensor": ("bytes data 1", "bytes offsets 2", "int32 dtype 3", "repeated int64 trailing_shape 4"),
    "ArrayRecord": ("string type_tag 1", "map BatchedTensor fields 2", "int64 num_datums 3"),
    "ForwardBackwardOutput": (
        "string loss_fn_output_type 1",
        "repeated ArrayRecord loss_fn_outputs 2",
        "map double metrics 3",
    ),
    "TopkLogprobs": ("bytes token_ids 1", "bytes logprobs 2", "uint32 k 3", "uint32 length 4"),
    "SampledSequence": (
        "int32 stop_reason 1",
        "bytes tokens 2",
        "bytes logprobs 3",
        "TopkLogprobs topk_sampled_logprobs 4",
    ),
    "SampleResponse": (
        "repeated SampledSequence sequences 1",
        "bytes prompt_logprobs 2",
        "TopkLogprobs topk_prompt_logprobs 3",
    ),
}
"""Fields of each message, as "[repeated|map] TYPE NAME NUMBER"; the keys of a map are strings. An enumeration is an
int32, which has the same form."""

_SCALARS = {
    "double": FieldDescriptorProto.TYPE_DOUBLE,
    "int64": FieldDescriptorProto.TYPE_INT64,
    "int32": FieldDescriptorProto.TYPE_INT32,
    "uint32": FieldDescriptorProto.TYPE_UINT32,
    "bool": FieldDescriptorProto.TYPE_BOOL,
    "string": FieldDescriptorProto.TYPE_STRING,
    "bytes": FieldDescriptorProto.TYPE_BYTES,
}


if TYPE_CHECKING:

    class TextMessage(Message):
        """Tokens in int32."""

        tokens: bytes

    class ChunkMessage(Message):
        """A part of an input."""

        encoded_text: TextMessage

    class CsrMessage(Message):
        """A sparse matrix."""

        values: bytes
        crow_indices: bytes
        col_indices: bytes

    class TensorMessage(Message):
        """An array."""

        dense: bytes
        sparse_csr: CsrMessage
        dtype: int
        shape: Sequence[int]

    class DatumMessage(Message):
        """A sequence."""

        model_input: Sequence[ChunkMessage]
        loss_fn_inputs: Mapping[str, TensorMessage]

    class SettingMessage(Message):
        """A setting of a loss."""

        number: float
        text: str

    class PassMessage(Message):
        """A pass of a model."""

        model_id: str
        seq_id: int
        data: Sequence[DatumMessage]
        loss_fn: str
        loss_fn_config: Mapping[str, float]
        forward_only: bool
        loss_fn_config_v2: Mapping[str, SettingMessage]


def new_message(name: str, **fields: object) -> Message:
    """A message of a name in `_MESSAGES`, with values for its fields."""
    message: Message = _CLASSES[name](**fields)
    return message


def parsed_pass(body: bytes) -> PassMessage:
    """The message in the body of a pass. Raises `google.protobuf.message.DecodeError`."""
    message = new_message("ForwardBackwardRequest")
    message.ParseFromString(body)
    return cast("PassMessage", message)


def _file() -> FileDescriptorProto:
    file = FileDescriptorProto(name=f"{_PACKAGE}.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field in fields:
            _add_field(message, name, field.split())
    return file


def _add_field(message: DescriptorProto, name: str, words: list[str]) -> None:
    *form, kind, field_name, number = words
    field = message.field.add(name=field_name, number=int(number))
    field.label = FieldDescriptorProto.LABEL_REPEATED if form else FieldDescriptorProto.LABEL_OPTIONAL
    if form == ["map"]:
        entry_name = "".join(part.capitalize() for part in field_name.split("_")) + "Entry"
        entry = message.nested_type.add(name=entry_name)
        entry.options.map_entry = True
        _add_field(entry, entry_name, ["string", "key", "1"])
        _add_field(entry, entry_name, [kind, "value", "2"])
        field.type, field.type_name = FieldDescriptorProto.TYPE_MESSAGE, f".{_PACKAGE}.{name}.{entry_name}"
    elif kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type, field.type_name = FieldDescriptorProto.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"


_POOL = DescriptorPool()
_POOL.Add(_file())
_CLASSES = {name: GetMessageClass(_POOL.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _MESSAGES}
