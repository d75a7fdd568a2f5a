"""The inference engines: how many, how large, how they get new weights, and how others reach them."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from skyrl.config.foundation.entry import BaseConfig
from skyrl.config.settings.models import Dtype
from skyrl.tree import FREE, FrozenDict, Secret, field, frozen
from skyrl.tree.types import Gigabytes, Seconds
from skyrl.tree.validators import non_negative, port, positive, positive_fraction

RolloutDtype = Literal["bfloat16", "bf16", "float16", "fp16", "float32", "fp32", "int8"]
"""A floating-point type, or int8 for matrix products in eight bits."""


@frozen
class InferenceEngineConfig(BaseConfig):
    """Inference engines, which serve the policy. One engine takes data x pipeline x tensor GPUs."""

    named_by: ClassVar[str] = "backend"

    backend: Literal["vllm", "torch", "http", "sglang"] = "vllm"
    """vllm: vLLM engines that the run starts; torch: the embedded engine, beside the learner, without a server; http:
    servers with vLLM's routes that run already, at `external_server_urls`; sglang: SGLang servers that the run
    starts, or that run already, at these addresses."""

    model_dtype: Dtype = "bfloat16"
    """Type in which the engines hold weights; weights are rounded to it when they are sent."""

    rollout_dtype: RolloutDtype | None = None
    """Type in which the torch engine holds weights and samples. bfloat16 with a learner in float32 samples faster from
    rounded weights: its log-probabilities differ by some hundredths of a nat, which
    `trainer.algorithm.off_policy_correction.tis_ratio_type` corrects for. int8: bfloat16 with the projections of the
    layers in eight bits, with a scale for each output and each token, on a CPU with VNNI: a tenth to a fifth faster
    than bfloat16 for 70 million parameters, slower for 3 million. None: `trainer.compute_dtype`. torch."""

    run_engines_locally: bool = True
    """The run starts the engines. False: they run already, at `external_server_urls` or `remote_urls`. An address in
    `external_server_urls` or `external_proxy_url` makes it false; one in `remote_urls` does not."""

    num_engines: int = field(default=1, validator=positive, metadata=FREE)
    """Replicas; prompts are spread over them. May change on resume: a sample uses the same random numbers on every
    engine."""

    min_engines: int = field(default=1, validator=positive, metadata=FREE)
    """Fewest engines that `skyrl engines drain RUN` leaves in service. At most `num_engines`."""

    max_engines: int | None = field(default=None, validator=positive, metadata=FREE)
    """Most engines that `skyrl engines add RUN` may reach during the run, on free GPUs of the cluster. At least
    `num_engines`. None: `num_engines`."""

    max_engine_restarts: int = field(default=3, validator=non_negative, metadata=FREE)
    """Maximum number of restarts of each engine that dies, while the others carry on; it serves again from the next
    weights on. If it was the last one, the run waits for it, and ends if it does not start. Engines that take turns
    with learners on GPUs stay out of service, since the learners hold the memory. A server at `external_server_urls`
    that failed or fell silent is asked again this often, while others carry on. 0: no restarts."""

    engine_restart_backoff_seconds: Seconds = field(default=5.0, validator=non_negative, metadata=FREE)
    """Pause before the first restart of an engine; it doubles with each further restart."""

    tensor_parallel_size: int = field(default=1, validator=positive)
    """GPUs that share each matrix of an engine."""

    pipeline_parallel_size: int = field(default=1, validator=positive)
    """GPUs that each hold a run of an engine's layers."""

    data_parallel_size: int = field(default=1, validator=positive)
    """Copies of the weights inside one engine."""

    expert_parallel_size: int = field(default=1, validator=positive)
    """GPUs over which experts are spread. 1: off; otherwise data times tensor parallel size."""

    deterministic: bool | None = None
    """A sample's tokens depend neither on concurrent requests nor on the engine that draws it: the torch engine decodes
    each request in a batch of its own, vLLM uses its batch-invariant kernels, which need CUDA. Slower. None:
    `trainer.deterministic`."""

    async_engine: bool = True
    """vLLM's asynchronous engine, in a process of its own. False: its offline engine, stepped in the engine's process.
    Requests join and leave a running batch in both. If not set, it is false for engines on Ray that compute on one GPU
    which they share with the learner (`trainer.placement.colocate_all`): they start sooner, and tokens do not travel
    between two processes. vllm."""

    vllm_v1_disable_multiproc: bool = True
    """Keep vLLM's scheduler and its worker in one process (VLLM_ENABLE_V1_MULTIPROCESSING=0): the engine's own where
    `async_engine` is off, for a repeatable order; else the one process that the asynchronous engine starts. False: each
    has its own. vllm."""

    distributed_executor_backend: Literal["ray", "mp"] = field(default="ray", metadata=FREE)
    """How one vLLM engine runs on several GPUs: Ray actors, or child processes on one node. vllm."""

    enable_return_routed_experts: bool = False
    """Return which experts of a mixture of experts processed each token, for learners that replay them
    (`trainer.policy.moe_enable_routing_replay`): a byte for each token, layer and expert chosen, or two above 256
    experts. torch, and vllm on GPUs."""

    enforce_eager: bool = False
    """Compute without CUDA graphs. True is slower, and some long runs were steadier with it; derived as true on a CPU,
    which has no such graphs. vllm and sglang."""

    enable_prefix_caching: bool = True
    """Reuse the keys and values of a prompt's beginning among requests (derived as false where old ones outlive new
    weights, see `trainer.fully_async.clear_kv_cache_on_weight_sync`): later turns of a conversation and prompts with
    a common system text compute what is new in them. The torch engine keeps up to 1 GiB of them until weights change,
    for Llama, Qwen2 and Qwen3 with `sdpa` or `flash_attention_2`, and none where it is deterministic; beginnings that
    several prompts share are kept from 64 tokens on."""

    enable_chunked_prefill: bool = True
    """Read long prompts in pieces between steps of generation. On a CPU, only where a whole sequence does not fit into
    max_num_batched_tokens. vllm and sglang."""

    max_num_batched_tokens: int = field(default=8192, validator=positive)
    """Maximum number of tokens that one step of an engine computes."""

    max_num_seqs: int = field(default=1024, validator=positive)
    """Maximum number of sequences that an engine runs at once; further ones wait for the first engine with capacity.
    Among several engines, one that reports a queue or a full KV cache is given fewer, down to a sixteenth."""

    gpu_memory_utilization: float = field(default=0.8, validator=positive_fraction, metadata=FREE)
    """Share of a GPU's memory that an engine takes for weights and cache. `kv_cache_memory_bytes` of
    `engine_init_kwargs` counts instead where it is given, and always on a CPU: by default, enough for 32 sequences of
    full length. vllm and sglang."""

    language_model_only: bool = False
    """Serve only the language model of a multimodal checkpoint, such as Qwen3.5: the memory of its other parts is free
    for keys and values. Learners are the language model alone anyway. vllm."""

    weight_sync_backend: Literal["nccl", "gloo", "disk", "delta", "none"] = field(default="nccl", metadata=FREE)
    """How new weights are sent to engines in other processes: broadcast over nccl (through CUDA IPC where GPUs are
    shared) or gloo (through shared memory on one machine), or as files in the run's folder: disk writes all of them,
    delta those that changed, where engines keep a copy of the others in the memory of their host. none: no weights are
    sent, for evaluation and generation by servers that have their own. If not set, it is gloo without CUDA, and disk
    for servers that run already; nccl and gloo reach those if the learner is on Ray and the server is SGLang's, or
    vLLM's with `skyrl.inference.vllm.worker.WorkerExtension`. Nothing travels within one process."""

    weight_sync_path: str | None = field(default=None, metadata=FREE)
    """Folder of weights that travel as files (`weight_sync_backend` is disk or delta), which learner and engines see
    under this path, or for delta its address in an object store (`s3://bucket/folder`). Runs must not share it. None: a
    folder in the run's folder."""

    logprob_parity_bound: float | None = field(default=None, validator=positive, metadata=FREE)
    """Largest mean absolute difference, in nats, between the log-probabilities of an engine and of the learner that
    rounding explains, over 256 tokens or more: of the samples of each step, and of prompts that are continued for that
    alone. Beyond it the run stops. If not set, it is that of the side that rounds more: 1e-3 in float32, 0.05 in
    float16, 0.2 in bfloat16, 0.3 in int8. Raise it for an engine that computes in less, such as fp8."""

    logprob_parity_interval: int = field(default=50, validator=positive, metadata=FREE)
    """Number of weight transfers from one comparison on prompts of its own to the next. The first transfer of every
    start and of a new engine is always compared, and each one to servers that do not show what they loaded."""

    weight_transfer_threshold_cuda_ipc_GB: Gigabytes = field(default=1.0, validator=positive, metadata=FREE)
    """Gigabytes of weights that are handed over at a time through CUDA IPC."""

    override_existing_update_group: Literal["auto", "enable", "disable"] = field(default="auto", metadata=FREE)
    """Whether vLLM servers that run already leave the group through which they were sent weights before, by a run that
    died during a transfer or by another program. auto, enable: they do. disable: a server in such a group is refused if
    it runs `skyrl.inference.vllm.worker.WorkerExtension`, which reports it. Engines that a run starts, and SGLang's,
    are in no group between transfers."""

    fully_sharded_loras: bool = False
    """Shard adapters over tensor-parallel GPUs wholly, not by half: faster for high ranks and long sequences. vllm."""

    remote_urls: tuple[str, ...] = field(default=(), metadata=FREE)
    """Old form of `external_server_urls`: `host:port` of engines that run already. Read only if
    `run_engines_locally` is false or the engine is http, since SkyRL's files write it beside `true`."""

    external_proxy_url: str | None = field(default=None, metadata=FREE)
    """Address of a router in front of engines that run already: requests for samples go there, each with the header
    `X-Session-ID` of its conversation."""

    external_server_urls: tuple[str, ...] | None = field(default=None, metadata=FREE)
    """Addresses of the engines themselves, `http://host:port` or `https://host:port`: weights and commands go there,
    and samples are asked for there if there is no router. `name:NAME` is an engine that publishes its address
    (docs/services.md), which is waited for when the run starts. A private certificate authority is named by the
    variable SSL_CERT_FILE."""

    external_token: Secret | None = field(default=None, metadata=FREE)
    """Bearer token of engines that run already and of their router: `env:NAME`, the variable that holds it."""

    enable_http_endpoint: bool = field(default=False, metadata=FREE)
    """Serve the policy over HTTP while it trains, in OpenAI's protocol, so that agents can call it. Set
    `trainer.algorithm.temperature` to the temperature that they use."""

    http_endpoint_host: str = field(default="127.0.0.1", metadata=FREE)
    """Address that the endpoint listens on. The default answers this machine only."""

    http_endpoint_port: int = field(default=8000, validator=port, metadata=FREE)
    """Port that the endpoint listens on."""

    served_model_name: str | None = field(default=None, metadata=FREE)
    """Model name that requests to the endpoint must carry. None: the policy's path."""

    enable_ray_prometheus_stats: bool = field(default=False, metadata=FREE)
    """Export vLLM's statistics through Ray's Prometheus metrics."""

    engine_init_kwargs: Mapping[str, Any] = FrozenDict()
    """Further arguments of vLLM, by the names of its AsyncEngineArgs, or of SGLang's server. An argument that has its
    own field here is refused. vllm and sglang."""
