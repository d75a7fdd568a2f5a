"""Bodies as version 0.38.0 of the client sends them are understood; bodies that are wrong are refused."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import tinker.proto.tinker_public_pb2 as client_messages
import zstandard
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from hypothesis import example, given
from hypothesis import strategies as st
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response
from tinker.types import AdamParams

from skyrl.endpoint.fields import Fields
from skyrl.errors import RequestError
from skyrl.inference.engine import TopLogprobs
from skyrl.training_service.backend import PassResult, SampledSequence, SampleResult
from skyrl.training_service.executor import adam_settings
from skyrl.training_service.messages import new_message
from skyrl.training_service.passes import PassLimits, pass_body, pass_request
from skyrl.training_service.samples import sample_body
from tests.training_service.bigrams import VOCABULARY
from tests.training_service.record_client import RECORD, SESSION
from tests.training_service.running import direct, running
from tests.training_service.test_client_methods import BASE, DATA
from tests.training_service.test_order_and_retries import (
    PROTOBUF,
    model_of,
    result,
    session_of,
)
from tests.training_service.test_order_and_retries import (
    pass_body as client_pass,
)

RECORDED: list[dict[str, str]] = json.loads(RECORD.read_text())

LIMITS = PassLimits(datums=4, context=64, vocabulary=VOCABULARY)


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of a service that all tests of this file share."""
    with running(tmp_path_factory.mktemp("bodies") / "service") as service, direct(service.url) as client:
        yield client


def content(recorded: dict[str, str]) -> bytes:
    """The body of a recorded request."""
    text = recorded["body"]
    return base64.b64decode(text) if recorded["type"] == PROTOBUF["content-type"] else text.encode()


@pytest.mark.long
def test_recorded_bodies_are_answered(http: httpx.Client) -> None:
    session = SESSION
    for recorded in RECORDED:
        path = recorded["path"].removeprefix("/api/v1").replace(SESSION, session)
        body = content(recorded).replace(SESSION.encode(), session.encode())
        answer = http.request(recorded["method"], path, content=body, headers={"content-type": recorded["type"]})
        assert answer.is_success, (path, answer.text)
        if path == "/create_session":
            session = answer.json()["session_id"]
        if "request_id" in answer.json() and "retrieve" not in path:
            response = result(http, answer.json()["request_id"])
            assert b'"error"' not in response.content, (path, response.content)


def test_messages_have_the_clients_fields() -> None:
    """Names, numbers and kinds of our fields are those of the client's descriptor."""
    file = FileDescriptorProto()
    client_messages.DESCRIPTOR.CopyToProto(file)
    fields_of_client = {message.name: {field.name: field for field in message.field} for message in file.message_type}
    names = {"EncodedText": "EncodedTextChunk", "Image": "ImageChunk", "Dmel": "DmelChunk"}
    for name in ("EncodedText", "Image", "Dmel", "Chunk", "Tensor", "SparseCsr", "Datum", "LossConfigValue",
                 "ForwardBackwardRequest", "BatchedTensor", "ArrayRecord", "ForwardBackwardOutput", "TopkLogprobs",
                 "SampledSequence", "SampleResponse"):  # fmt: skip
        for field in new_message(name).DESCRIPTOR.fields:
            their = fields_of_client[names.get(name, name)][field.name]
            enum = their.type == their.TYPE_ENUM and field.type == field.TYPE_INT32
            assert field.number == their.number, (name, field.name)
            assert field.is_repeated == (their.label == their.LABEL_REPEATED), (name, field.name)
            assert enum or field.type == their.type, (name, field.name)


@pytest.mark.long
def test_outputs_of_different_shapes_reach_the_client() -> None:
    outputs = [
        {"logprobs": np.array([-1.0, -2.0], np.float32)},
        {"logprobs": np.array([[-1.0, -2.0, -3.0]], np.float32)},
        {"logprobs": np.array([-4.0], np.float32)},
    ]
    read = deserialize_forward_backward_output(pass_body(PassResult(outputs=outputs, metrics={"loss:sum": 1.5})))
    assert read.metrics == {"loss:sum": 1.5}
    for sent, arrived in zip(outputs, read.loss_fn_outputs, strict=True):
        assert arrived["logprobs"].shape == list(sent["logprobs"].shape)
        assert arrived["logprobs"].data == sent["logprobs"].ravel().tolist()


@pytest.mark.long
def test_a_sample_reaches_the_client() -> None:
    top = TopLogprobs(token_ids=np.array([[3, 4]], np.int32), logprobs=np.array([[-0.5, -1.0]], np.float32))
    sequence = SampledSequence(tokens=(5, 6), logprobs=(-1.0, -2.0), ended=True)
    body = sample_body(SampleResult(sequences=(sequence,), prompt_logprobs=(np.nan, -0.5), prompt_top=top), None)
    read = deserialize_sample_response(body)
    assert (read.sequences[0].tokens, read.sequences[0].stop_reason) == ([5, 6], "stop")
    assert read.prompt_logprobs == [None, -0.5]
    assert read.topk_prompt_logprobs == [None, [(3, -0.5), (4, -1.0)]]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def fields_of(body: bytes) -> list[tuple[str, ...]]:
    """Paths to the fields of a recorded JSON body, nested ones included."""

    def walk(value: object, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        if path:
            yield path
        if isinstance(value, dict):
            for name, child in value.items():
                yield from walk(child, (*path, name))

    return list(walk(json.loads(body), ()))


MUTATIONS = [
    (index, path)
    for index, recorded in enumerate(RECORDED)
    if recorded["type"] == "application/json"
    for path in fields_of(content(recorded))
]


def refused_or_answered(http: httpx.Client, answer: httpx.Response) -> None:
    """Nothing failed: a mistake is the sender's, whether it is told at once or as the result."""
    assert answer.status_code < 500, answer.text
    if not answer.is_success:
        assert answer.json()["category"] == "user"
    elif "request_id" in answer.text and "try_again" not in answer.text:
        request_id = answer.json().get("request_id")
        if request_id and not request_id.endswith((":2", ":3", ":4")):
            response = http.post("/retrieve_future", json={"request_id": request_id})
            assert b'"server"' not in response.content, response.content


@example(case=MUTATIONS[0], value=float("nan"))
@given(case=st.sampled_from(MUTATIONS), value=JSON)
def test_wrong_fields_are_refused(http: httpx.Client, case: tuple[int, tuple[str, ...]], value: object) -> None:
    index, path = case
    recorded = RECORDED[index]
    if "retrieve" in recorded["path"] or recorded["path"].endswith("finish"):
        return
    body: Any = json.loads(content(recorded))
    node = body
    for name in path[:-1]:
        node = node[name]
    node[path[-1]] = value
    sent = http.post(
        recorded["path"].removeprefix("/api/v1"),
        content=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    refused_or_answered(http, sent)


@given(body=st.binary(max_size=64), path=st.sampled_from(sorted({request["path"] for request in RECORDED})))
def test_garbage_is_refused(http: httpx.Client, body: bytes, path: str) -> None:
    for headers in (PROTOBUF, {"content-type": "application/json"}, {**PROTOBUF, "content-encoding": "zstd"}):
        answer = http.post(path.removeprefix("/api/v1"), content=body, headers=headers)
        assert 400 <= answer.status_code < 500, answer.text
        assert set(answer.json()) == {"error", "category"}


@pytest.mark.long
@given(data=st.data())
def test_passes_with_flipped_bytes_are_read_or_refused(data: st.DataObject) -> None:
    body = bytearray(client_pass("m", 1, DATA))
    for position in data.draw(st.lists(st.integers(0, len(body) - 1), min_size=1, max_size=4)):
        body[position] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(body)))
    for candidate in (bytes(body), bytes(body[:cut])):
        try:
            request = pass_request(candidate, LIMITS)
        except RequestError:
            continue
        for datum in request.data:
            assert all(len(array) == len(datum.tokens) for array in datum.inputs.values())


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        ({"dense": b"\0" * 8, "dtype": 1}, r"has the shape \[2\]"),
        ({"dense": b"\0" * 5, "dtype": 1}, "5 bytes, which are no elements of 4"),
        ({"dense": b"\0" * 12, "dtype": 9}, "9 is not a known dtype"),
        ({"dense": b"\0" * 12, "dtype": 1, "shape": [3, 2]}, "has 3 elements, which is not the shape"),
        ({"dense": b"\xff" * 12, "dtype": 1}, "contains NaN"),
        ({"sparse_csr": {"values": b""}, "dtype": 1, "shape": [3, 1 << 40]}, "at most 67108864 elements"),
        ({"sparse_csr": {"values": b""}, "dtype": 1, "shape": [3, 2]}, "do not describe a matrix"),
    ],
)
def test_wrong_arrays_are_named(tensor: dict[str, Any], message: str) -> None:
    chunk = new_message("Chunk", encoded_text={"tokens": np.arange(3, dtype="<i4").tobytes()})
    datum = new_message("Datum", model_input=[chunk], loss_fn_inputs={"weights": new_message("Tensor", **tensor)})
    request = new_message("ForwardBackwardRequest", model_id="m", seq_id=1, data=[datum], loss_fn="cross_entropy")
    with pytest.raises(RequestError, match=message) as caught:
        pass_request(request.SerializeToString(), LIMITS)
    assert caught.value.param == "data[0].loss_fn_inputs.weights"


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        ({"image": {"data": b"x", "format": "png"}}, "an image is not supported"),
        ({"dmel": {"dmel": b"x"}}, "audio is not supported"),
        ({}, "a chunk of this kind is not supported"),
    ],
)
def test_chunks_that_are_no_text_are_refused(chunk: dict[str, Any], message: str) -> None:
    data = [new_message("Datum", model_input=[new_message("Chunk", **chunk)])]
    body = new_message("ForwardBackwardRequest", model_id="m", seq_id=1, data=data).SerializeToString()
    with pytest.raises(RequestError, match=rf"data\[0\].model_input: {message}"):
        pass_request(body, LIMITS)


@pytest.mark.long
def test_a_sparse_array_is_spread() -> None:
    chunk = new_message("Chunk", encoded_text={"tokens": np.arange(2, dtype="<i4").tobytes()})
    csr = {
        "values": np.array([5.0, 7.0], "<f4").tobytes(),
        "crow_indices": np.array([0, 2, 2], "<i8").tobytes(),
        "col_indices": np.array([0, 2], "<i8").tobytes(),
    }
    weights = new_message("Tensor", sparse_csr=csr, dtype=1, shape=[2, 3])
    datum = new_message("Datum", model_input=[chunk], loss_fn_inputs={"weights": weights})
    request = new_message("ForwardBackwardRequest", model_id="m", seq_id=1, data=[datum], loss_fn="cross_entropy")
    (read,) = pass_request(request.SerializeToString(), LIMITS).data
    assert read.inputs["weights"].tolist() == [[5.0, 0.0, 7.0], [0.0, 0.0, 0.0]]


@pytest.mark.long
def test_a_compressed_bomb_is_refused(http: httpx.Client) -> None:
    model = model_of(http, session_of(http))
    packed = zstandard.ZstdCompressor().compress(b"\0" * (65 << 20))
    answer = http.post("/forward_backward", content=packed, headers={**PROTOBUF, "content-encoding": "zstd"})
    assert (answer.status_code, model.endswith(":train:0"), BASE) == (413, True, "toy/bigram")


@pytest.mark.parametrize("name", ["learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm"])
def test_a_setting_of_adam_that_is_not_finite_is_no_default(name: str) -> None:
    body = AdamParams(**{name: float("nan")}).model_dump_json()
    with pytest.raises(RequestError, match=f"{name} is null, as NaN"):
        adam_settings(Fields({"adam_params": json.loads(body)}))
