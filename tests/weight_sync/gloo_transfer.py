"""vLLM's weight transfer over gloo: what vLLM ships moves GPU memory, and everything around that is the same.

`register()` in the process that sends and in that of the worker that receives.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch._C._distributed_c10d import ProcessGroupGloo, TCPStore
from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine, WeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferUpdateInfo
from vllm.model_executor.model_loader import reload

from skyrl.weight_receiver.incoming_weights import as_bytes
from skyrl.weight_sync import senders

PATIENCE = timedelta(seconds=20)
FLIP: list[str] = []
"""Names of weights of which the receiver gets one byte wrong."""


def join(host: str, port: int, rank: int, size: int) -> Any:
    store = TCPStore(host, port, is_master=rank == 0, wait_for_workers=False, timeout=PATIENCE)
    return ProcessGroupGloo(store, rank, size, PATIENCE)


class Receiver(WeightTransferEngine[NCCLWeightTransferInitInfo, NCCLWeightTransferUpdateInfo]):
    """The worker's end, with the lifecycle of vLLM's NCCL engine."""

    init_info_cls = NCCLWeightTransferInitInfo
    update_info_cls = NCCLWeightTransferUpdateInfo
    model_update_group: Any = None

    def init_transfer_engine(self, init_info: NCCLWeightTransferInitInfo) -> None:
        rank = init_info.rank_offset + self.parallel_config.rank
        address = (str(init_info.master_address), int(init_info.master_port or 0))
        self.model_update_group = join(*address, rank, init_info.world_size)

    def start_weight_update(self) -> None:
        reload.initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        reload.finalize_layerwise_reload(self.model, self.model_config)  # type: ignore[no-untyped-call]  # vLLM is not annotated

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
            weight = torch.empty(shape, dtype=getattr(torch, dtype))
            self.model_update_group.broadcast(weight, 0).wait()
            if name in FLIP:
                as_bytes(weight)[5] ^= 1  # a view: it is contiguous and on the CPU
            self.model.load_weights([(name, weight)])  # type: ignore[operator]  # vLLM is not annotated

    def shutdown(self) -> None:
        self.model_update_group = None


@dataclass
class GlooInitInfo(TrainerInitInfo):
    backend: ClassVar[str] = "gloo"
    master_address: str
    master_port: int
    world_size: int


class Sender(TrainerWeightTransferEngine[GlooInitInfo]):
    """The learner's end, in the order of vLLM's NCCL engine."""

    init_info_cls = GlooInitInfo
    group: Any = None

    @classmethod
    def trainer_init(cls, init_info: GlooInitInfo, *, client: Any, source: Any = None) -> Sender:
        engine = cls(client=client, source=source, is_sender=True)
        address = (init_info.master_address, init_info.master_port)
        workers = NCCLWeightTransferInitInfo(
            master_address=address[0], master_port=address[1], rank_offset=1, world_size=init_info.world_size
        )
        with ThreadPoolExecutor(1) as executor:
            joined = executor.submit(join, *address, 0, init_info.world_size)
            client.init_weight_transfer_engine({k: v for k, v in asdict(workers).items() if v is not None})
            engine.group = joined.result()
        return engine

    def send_weights(self) -> None:
        assert self.source is not None
        meta = self.source.metadata()
        info = {
            "names": [tensor.name for tensor in meta],
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in meta],
            "shapes": [list(tensor.shape) for tensor in meta],
        }
        self.client.start_weight_update()
        with ThreadPoolExecutor(1) as executor:
            update = executor.submit(self.client.update_weights, info)
            for _, weight in self.source:
                self.group.broadcast(weight.clone(), 0).wait()
            update.result()
        self.client.finish_weight_update()

    def shutdown(self) -> None:
        self.group = None


def register() -> None:
    """Makes `gloo` a backend of both ends, once."""
    if "gloo" not in senders.INIT_INFOS:
        WeightTransferEngineFactory.register_engine("gloo", Receiver)
        WeightTransferTrainerFactory.register_engine("gloo", Sender)
        senders.INIT_INFOS["gloo"] = GlooInitInfo
