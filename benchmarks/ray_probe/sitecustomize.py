"""Times functions in every process of a run: Python imports this file at its start wherever this folder is in
PYTHONPATH and RAY_PROBE names a folder.

Each process appends lines of JSON to a file of its own there: a call as [name, began, ended], in seconds of the
monotonic clock, which all processes of a machine share, and its CPU-seconds so far as ["cpu", now, seconds]. What a
revision does not have is left out, so that one probe measures several.
"""

from __future__ import annotations

import atexit
import functools
import importlib.abc
import inspect
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

TIMED = {
    "skyrl.cli": {"run": ["main"]},
    "skyrl.experiments.experiment": {"start: Ray": ["start_processes"]},
    "skyrl.training.trainer": {"step": ["PPOTrainer.step"], "collate": ["collate"], "describe": ["describe"]},
    "skyrl.processes.ray.processes": {
        "start: actors": ["RayProcesses._start_objects"],
        "end: processes": ["RayProcesses.close"],
    },
    "skyrl.processes.ray.cluster": {"end: Ray": ["Cluster.close"], "end: kill": ["kill_tagged"]},
    "skyrl.processes.ray.watch": {"end: watch": ["Watch.close"]},
    "skyrl.experiments.ppo": {"end: engines and files": ["BasePPOExp.close"], "end: model": ["BasePPOExp.finish"]},
    "skyrl.training.loop": {"end: checkpoint": ["TrainingLoop._stop", "TrainingLoop._save"]},
    "skyrl.runs.session": {"start: data and tokenizer": ["RunSession._find_start"]},
    "skyrl.rollout.batches": {"rollouts": ["SampledRollouts.next_batch", "Rollouts.next_batch"]},
    "skyrl.rollout.generator": {"rollouts": ["SkyRLGymGenerator.generate"]},
    "skyrl.rollout.sampling_session": {"rollouts: requests": ["SamplingSession._sample_first_turns"]},
    "skyrl.tracking.jsonlines": {"files": ["JsonLines.append"]},
    "skyrl.learners.workers.group": {
        "update": ["LearnerGroup.forward_backward", "LearnerGroup.optimizer_step"],
        "score": ["ScorerGroup.score"],
    },
    "skyrl.learners.workers.roles": {"start: learner": ["PolicyWorker.__init__"]},
    "skyrl.learners.workers.learning_worker": {
        "update": ["LearningWorker.forward_backward_share", "LearningWorker.optimizer_step"],
        "gather and send": ["LearningWorker.stream"],
    },
    "skyrl.learners.workers.model_worker": {
        "score": ["ModelWorker.score"],
        "update: moves": ["ModelWorker.offload", "ModelWorker.onload"],
    },
    "skyrl.training.time_sharing": {
        "turns: wake": ["TimeSharing._wake"],
        "turns: sleep": ["TimeSharing._sleep"],
        "turns: models": ["TimeSharing._load_only"],
    },
    "skyrl.weight_sync.publish": {"transfer": ["WeightSync._send"]},
    "skyrl.weight_sync.canary": {"transfer: canary": ["Canary.compare"]},
    "skyrl.weight_sync.transports": {
        "transfer: send and load": ["BroadcastTransport.send", "VLLMNativeTransport.send"],
    },
    "skyrl.inference.pool.client": {
        "transfer: pause": ["InferenceEngineClient.pause"],
        "transfer: resume": ["InferenceEngineClient.resume"],
        "transfer: load": ["InferenceEngineClient.load_weights"],
        "end: engines": ["InferenceEngineClient.close"],
    },
    "skyrl.weight_sync.senders": {
        "transfer: sender": ["BroadcastSender.__call__", "VLLMNativeSender.__call__"],
        "transfer: digests": ["digest", "digest_word", "Digests.add", "Digests.in_hex"],
    },
    "skyrl.weight_receiver.transfer_group": {
        "transfer: requests": ["Requests.ask"],
        "transfer: waits": ["wait_for"],
        "transfer: group": ["TransferGroup._make_group"],
    },
    "skyrl.weight_receiver.vllm_native": {
        "transfer: digests": ["digest_word", "Digests.add", "Digests.in_hex"],
    },
    "skyrl.weight_receiver.incoming_weights": {"transfer: digests": ["digest"]},
    "skyrl.inference.vllm.engine": {
        "start: engine": ["VLLMEngine.__init__"],
        "end: engine": ["VLLMEngine.close"],
        "generate: a request": ["VLLMEngine._generate"],
        "transfer: load": ["VLLMEngine._reload_weights"],
        "transfer: pause": ["VLLMEngine._pause"],
        "transfer: resume": ["VLLMEngine._resume"],
        "transfer: wake": ["VLLMEngine.wake"],
        "transfer: sleep": ["VLLMEngine.sleep"],
        "generate: completions": ["completion"],
        "generate: arguments": ["sampling_arguments"],
    },
    "skyrl.inference.vllm.backend": {"transfer: forget": ["Backend.forget"]},
    "skyrl.inference.vllm.worker": {
        "transfer: load in the worker": ["WorkerExtension.skyrl_load_weights"],
        "transfer: heads": ["WorkerExtension._skyrl_renew_packed"],
    },
    "vllm.model_executor.model_loader.reload.layerwise": {
        "transfer: reload begins": ["initialize_layerwise_reload"],
        "transfer: reload ends": ["finalize_layerwise_reload"],
    },
    "skyrl.inference.vllm.in_place": {"transfer: in place": ["load_in_place", "in_place_obstacle"]},
    "vllm.distributed.weight_transfer.ipc_engine": {
        "transfer: CUDA IPC": [
            "IPCWeightTransferEngine.receive_weights",
            "IPCTrainerWeightTransferEngine.trainer_init",
            "IPCTrainerWeightTransferEngine.send_weights",
        ],
    },
    "vllm.device_allocator.cumem": {"turns: memory": ["CuMemAllocator.sleep", "CuMemAllocator.wake_up"]},
    "vllm.v1.worker.gpu_worker": {
        "start: weights": ["Worker.load_model"],
        "start: memory": ["Worker.determine_available_memory"],
        "start: graphs": ["Worker.compile_or_warm_up_model"],
    },
    "vllm.v1.engine.async_llm": {
        "start: vLLM": ["AsyncLLM.from_engine_args"],
        "generate: submit": ["AsyncLLM.add_request"],
    },
    "vllm.v1.engine.llm_engine": {
        "start: vLLM": ["LLMEngine.from_engine_args"],
        "generate: submit": ["LLMEngine.add_request"],
        "generate: steps": ["LLMEngine.step"],
    },
    "vllm.v1.engine.output_processor": {"generate: outputs": ["OutputProcessor.process_outputs"]},
    "vllm.v1.engine.core": {
        "start: engine core": ["EngineCore.__init__"],
        "generate: core steps": ["EngineCore.step", "EngineCore.step_with_batch_queue"],
    },
    "vllm.v1.core.sched.scheduler": {
        "generate: schedule": ["Scheduler.schedule"],
        "generate: update": ["Scheduler.update_from_output"],
    },
    "vllm.v1.worker.gpu_model_runner": {
        "generate: prepare": ["GPUModelRunner._prepare_inputs", "GPUModelRunner._update_states"],
        "generate: model": ["GPUModelRunner.execute_model"],
        "generate: sample": ["GPUModelRunner._sample"],
        "generate: bookkeeping": ["GPUModelRunner._bookkeeping_sync"],
        "start: warm-up": ["GPUModelRunner.profile_run", "GPUModelRunner.capture_model"],
    },
}
"""Module -> what is measured -> the functions that are it."""

_PERIOD = 0.25


class Record:
    """What this process has measured and not written yet."""

    def __init__(self, folder: str) -> None:
        self._path = os.path.join(folder, f"{os.getpid()}.jsonl")
        self._lines: list[list[Any]] = []
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def add(self, *line: Any) -> None:
        """Keep a line for the next writing."""
        if os.getpid() != self._pid:  # a child by fork
            return
        self._lines.append(list(line))

    def begin(self) -> None:
        """Write from a thread until the process ends, and at its end."""
        self.add("process", time.monotonic(), sys.argv[:3])
        threading.Thread(target=self._write_again, daemon=True, name="probe").start()
        atexit.register(self._write)

    def _write_again(self) -> None:
        while True:
            time.sleep(_PERIOD)
            self._write()

    def _write(self) -> None:
        self.add("cpu", time.monotonic(), time.process_time())
        with self._lock:
            lines, self._lines = self._lines, []
            with open(self._path, "a", encoding="utf-8") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)


def timed(record: Record, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which records its calls; a coroutine's until it is done."""
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def waited(*args: Any, **kwargs: Any) -> Any:
            began = time.monotonic()
            try:
                return await function(*args, **kwargs)
            finally:
                record.add(name, began, time.monotonic())

        return waited

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        began = time.monotonic()
        try:
            return function(*args, **kwargs)
        finally:
            record.add(name, began, time.monotonic())

    return called


class Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of `TIMED` as others do, and wraps their functions once they are executed."""

    def __init__(self, record: Record) -> None:
        self._record = record

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if name not in TIMED:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                execute = spec.loader.exec_module
                setattr(spec.loader, "exec_module", functools.partial(self._execute, execute))  # noqa: B010 - typed slot
                return spec
        return None

    def _execute(self, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
        execute(module)
        self._wrap(module)

    def _wrap(self, module: ModuleType) -> None:
        for label, functions in TIMED[module.__name__].items():
            for path in functions:
                *owners, last = path.split(".")
                owner: Any = module
                for name in owners:
                    owner = getattr(owner, name, None)
                function = vars(owner).get(last) if owner is not None else None
                if isinstance(function, classmethod):
                    setattr(owner, last, classmethod(timed(self._record, label, function.__func__)))
                elif callable(function):
                    setattr(owner, last, timed(self._record, label, function))


if folder := os.environ.get("RAY_PROBE"):
    _record = Record(folder)
    _record.begin()
    sys.meta_path.insert(0, Finder(_record))
