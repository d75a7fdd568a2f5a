"""Content of the services, read by the readers of their own packages.

`python -m tests.tracking.readers mlflow RUN METRIC` prints it, for packages that another environment has.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Points = list[tuple[int, float]]
"""(step, value) in the order in which they are stored."""

METRIC = "policy/final_loss"


def in_tensorboard(folder: Path, name: str = METRIC) -> Points:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    return [(event.step, event.value) for event in read.Scalars(name)]


def texts_in_tensorboard(folder: Path, name: str) -> list[str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder / "tensorboard"), size_guidance={"tensors": 0}).Reload()
    return [event.tensor_proto.string_val[0].decode() for event in read.Tensors(name)]


def wandb_records(folder: Path) -> Iterator[Any]:
    """Records of all folders of offline sessions, in their order."""
    from wandb.proto import wandb_internal_pb2

    protobuf: Any = wandb_internal_pb2  # its classes are made when it is imported
    for file in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        for data in _log_records(file.read_bytes()):
            record = protobuf.Record()
            record.ParseFromString(data)
            yield record


def in_wandb(folder: Path, name: str = METRIC) -> Points:
    return [(row["_step"], row[name]) for row in wandb_rows(folder) if name in row]


def wandb_rows(folder: Path) -> list[dict[str, Any]]:
    rows = [record.history.item for record in wandb_records(folder) if record.WhichOneof("record_type") == "history"]
    return [{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in row} for row in rows]


def in_mlflow(folder: Path, name: str = METRIC) -> Points:
    from mlflow import MlflowClient

    client, known = MlflowClient(f"sqlite:///{folder.parent / 'mlflow.db'}"), _known(folder, "mlflow")
    return [(point.step, point.value) for point in client.get_metric_history(known["id"], name)]


def in_swanlab(folder: Path, name: str = METRIC) -> Points:
    return [(metric.step, metric.value.number) for metric in _swanlab_metrics(folder) if metric.key == name]


def _swanlab_metrics(folder: Path) -> Iterator[Any]:
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    for file in sorted(folder.glob("swanlog/run-*/*.swanlab")):
        reader = DataStoreReader()
        reader.open(file)
        for data in reader:
            record = Record()
            record.ParseFromString(data)
            if record.HasField("scalar"):
                yield record.scalar
        reader.close()


def _known(folder: Path, service: str) -> dict[str, Any]:
    known: dict[str, Any] = json.loads((folder / "trackers" / f"{service}.json").read_text())
    return known


def _log_records(data: bytes) -> Iterator[bytes]:
    """Records of a LevelDB log, which W&B's files are behind 7 bytes: https://github.com/google/leveldb, log_format.md.
    W&B's own reader of them is a program that uploads.
    """
    block, header, at, parts = 32_768, struct.Struct("<IHB"), 7, b""
    while at + header.size <= len(data):
        if (rest := block - at % block) < header.size:
            at += rest
            continue
        _, length, kind = header.unpack_from(data, at)
        parts += data[at + header.size : at + header.size + length]
        at += header.size + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


READERS = {"tensorboard": in_tensorboard, "wandb": in_wandb, "mlflow": in_mlflow, "swanlab": in_swanlab}

if __name__ == "__main__":
    print(json.dumps(READERS[sys.argv[1]](Path(sys.argv[2]), sys.argv[3])))
