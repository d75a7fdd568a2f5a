"""The receiving end of vLLM's own weight transfer, inside a vLLM worker: it executes the requests of the sender.

    init -> start -> update, once or more -> compare -> finish -> end     (requests of `VLLMNativeSender`)

Between update and finish, the digests of the tensors that reached the model's `load_weights` are compared with the
sender's. They prove that the right bytes reached the GPU under the right names. The canary proves that the layers
compute with them, in fused and packed form.
"""

from __future__ import annotations

import base64
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.storage import TypedStorage

from skyrl.errors import WeightSyncError
from skyrl.weight_receiver import transfer_group
from skyrl.weight_receiver.checksums import Digests
from skyrl.weight_receiver.incoming_weights import VLLMNativeWeights, Weights, summarize_problems


def receive(worker: Any, index: int, incoming: VLLMNativeWeights, expand: Callable[[Weights], Weights]) -> None:
    """Executes all of the sender's requests on this worker, the one at `index` in its engine.

    `expand` adds second names of tied weights. Raises `WeightSyncError` if weights differ from those that were sent, or
    if the sender or another worker gave up.
    """
    if worker.weight_transfer_engine is None:  # vLLM creates it at start-up only if a backend is configured then
        config = importlib.import_module("vllm.config").WeightTransferConfig(backend=incoming.backend)
        factory = importlib.import_module("vllm.distributed.weight_transfer.factory").WeightTransferEngineFactory
        model = worker.model_runner.get_model()
        worker.weight_transfer_engine = factory.create_engine(config, worker.vllm_config, worker.device, model)
    received = Digests()
    group = incoming.group.with_rank_offset(index)
    with group.rendezvous() as members:
        for kind, content in transfer_group.received_requests(members, rank=group.rank, timeout=group.timeout):
            match kind:
                case "init":
                    if "rank_offset" in content:  # vLLM adds the worker's rank to it, and knows only one engine
                        content["rank_offset"] = incoming.group.rank
                    worker.init_weight_transfer_engine(content)
                case "start":
                    worker._weight_update_active = False  # vLLM would not begin another update after one that was cut
                    worker.start_weight_update()
                case "update":
                    with _watched(worker.model_runner.get_model(), received, expand):
                        worker.update_weights(with_handles(content))
                case "compare":
                    refuse_changed(content["digests"], received.in_hex())
                case "finish":
                    worker.finish_weight_update()
                case transfer_group.END:
                    worker.shutdown_weight_transfer_engine()


def group_holder(worker: Any) -> str:
    """Class name of the worker's transfer engine if that holds a group with a sender; otherwise empty.

    A run that died during a transfer leaves a group behind, and some programs keep one group for all transfers.
    """
    engine = worker.weight_transfer_engine
    return "" if getattr(engine, "model_update_group", None) is None else type(engine).__name__


@contextmanager
def _watched(model: Any, received: Digests, expand: Callable[[Weights], Weights]) -> Iterator[None]:
    """While the model loads weights, adds their digests to `received`, and passes tied ones under all their names."""
    load = model.load_weights

    def digested(weights: Weights) -> Weights:
        for name, tensor in weights:
            try:
                received.add(name, tensor)
            except ValueError:
                raise WeightSyncError(f"{name} arrived twice") from None
            yield name, tensor
        received.flush()  # the memory of the tensors is used again

    model.load_weights = lambda weights: load(expand(digested(weights)))
    try:
        yield
    finally:
        del model.load_weights  # uncovers the method of the class


def refuse_changed(sent: Mapping[str, str], received: Mapping[str, str]) -> None:
    """Raises `WeightSyncError` unless exactly the weights that were sent arrived, unchanged."""
    problems = [f"{name} did not arrive" for name in sent if name not in received]
    problems += [f"{name} arrived, which was not sent" for name in received if name not in sent]
    problems += [
        f"{name} was changed in transit: digest {received[name]} arrived, {digest} was sent"
        for name, digest in sent.items()
        if received.get(name, digest) != digest
    ]
    if problems:
        raise WeightSyncError(summarize_problems(problems))


_TENSOR, _SIZE, _STORAGE, _DTYPE = 0, 1, 4, 5
"""Indices of arguments of torch's `rebuild_cuda_tensor` that JSON cannot represent, besides bytes."""


def plain_handle(arguments: Sequence[Any]) -> list[Any]:
    """The arguments of torch's `rebuild_cuda_tensor`, for a tensor of bytes, as JSON-compatible data."""
    known = (arguments[_TENSOR], arguments[_STORAGE], arguments[_DTYPE])
    assert known == (torch.Tensor, TypedStorage, torch.uint8), f"a handle of {known}"
    plain: list[Any] = []
    for index, value in enumerate(arguments):
        if index in (_TENSOR, _STORAGE, _DTYPE):
            plain.append(None)
        elif isinstance(value, bytes):
            plain.append({"bytes": base64.b64encode(value).decode("ascii")})
        else:
            plain.append(list(value) if isinstance(value, tuple) else value)
    return plain


def handle(plain: Sequence[Any]) -> tuple[Any, ...]:
    """Rebuild the handle that `plain_handle` described. Its classes are always those of a tensor of bytes, whatever the
    sender claims.
    """
    arguments = [base64.b64decode(value["bytes"]) if isinstance(value, dict) else value for value in plain]
    arguments[_TENSOR], arguments[_STORAGE], arguments[_DTYPE] = torch.Tensor, TypedStorage, torch.uint8
    arguments[_SIZE] = torch.Size(arguments[_SIZE])
    return tuple(tuple(value) if isinstance(value, list) else value for value in arguments)


def with_handles(content: dict[str, Any]) -> dict[str, Any]:
    """An update as vLLM's workers take it, with rebuilt CUDA IPC handles."""
    if "ipc_handles" not in content:
        return content
    return content | {"ipc_handles": {gpu: handle(plain) for gpu, plain in content["ipc_handles"].items()}}
