"""Code that needs CUDA: which stages use it, and which tests try it on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from attrs import frozen


@frozen(kw_only=True)
class CudaPath:
    """One way through the code that a CPU does not take."""

    name: str
    shown_by: Callable[[Mapping[str, Any]], bool]
    """Whether a record of a stage on a GPU shows that it ran."""

    tests: tuple[str, ...]
    """Tests that try it on a CPU as far as it goes: `path::test`."""


def _part_of(*stages: str, having: str = "") -> Callable[[Mapping[str, Any]], bool]:
    """Records of these stages with a measurement whose name contains `having`."""
    return lambda record: record["stage"] in stages and any(having in name for name in record["parts"])


def _nowhere(record: Mapping[str, Any]) -> bool:
    return False


_VLLM_RUNS = ("smollm2.vllm", "step.vllm")

PATHS = (
    CudaPath(
        name="variable-length attention, prompts shared",
        shown_by=_part_of("learner", having="shared prompts"),
        tests=("tests/models/test_varlen_attention.py::test_a_prompt_is_computed_once_and_read_by_each_answer",),
    ),
    CudaPath(
        name="long rows, recomputed and not",
        shown_by=_part_of("long_rows"),
        tests=("tests/algorithms/test_linear_logprobs.py::test_no_tensor_of_tokens_times_vocabulary_is_ever_made",),
    ),
    CudaPath(
        name="fused kernels of Liger, in a whole update",
        shown_by=lambda record: record["stage"] in ("learner", "long_rows") and "liger-kernel" in record["versions"],
        tests=("tests/models/test_fused_layers.py::"
               "test_modules_that_compute_the_same_are_fused_and_the_model_computes_as_before",),
    ),
    CudaPath(
        name="compiled decoder layers (`trainer.policy.use_torch_compile`)",
        shown_by=lambda record: (
            any("layers compiled" in name for name in record["parts"])
            or (bool(record["parts"]) and "trainer.policy.use_torch_compile=true" in record.get("changes", ()))
        ),
        tests=("tests/models/test_compiled_layers.py::test_layers_of_one_kind_are_compiled_once_for_all_lengths",),
    ),
    CudaPath(
        name="cuDNN's attention over long rows",
        shown_by=_part_of("long_rows", "tests"),
        tests=("tests/models/test_varlen_attention.py::test_a_call_for_each_long_sequence_computes_the_same",),
    ),
    CudaPath(
        name="memory-efficient attention in float32",
        shown_by=_part_of("tests"),
        tests=("tests/models/test_varlen_attention.py::"
               "test_the_kernel_is_what_a_gpu_has_for_the_type_and_the_lengths",),
    ),
    CudaPath(
        name="Triton kernels of log-probabilities and entropy",
        shown_by=_part_of("learner", "long_rows", "tests"),
        tests=("tests/algorithms/test_logprob_kernels.py::"
               "test_interpreted_kernels_compute_what_the_whole_table_gives",),
    ),
    CudaPath(
        name="flash-attn (`flash_attention_2`)",
        shown_by=_nowhere,
        tests=("tests/learners/test_waiting.py::"
               "test_flash_attention_is_told_the_lengths_by_the_names_that_transformers_reads",),
    ),
    CudaPath(
        name="kernels of context parallelism",
        shown_by=_part_of("tests"),
        tests=("tests/models/test_context_parallel.py::test_output_and_gradients_are_those_of_one_rank",),
    ),
    CudaPath(
        name="activations that wait on the host",
        shown_by=_part_of("tests"),
        tests=("tests/learners/test_host_activations.py::"
               "test_the_input_of_each_layer_goes_and_comes_once_and_the_gradient_is_the_same",),
    ),
    CudaPath(
        name="models and optimizer state moved off the GPU",
        shown_by=_part_of("tests", *_VLLM_RUNS),
        tests=("tests/learners/test_moving.py::test_the_model_goes_first_then_two_slots_for_each_weight",
               "tests/training/test_time_sharing.py::"
               "test_a_step_moves_each_part_once_and_nobody_comes_before_the_others_have_left"),
    ),
    CudaPath(
        name="memory beside the estimate of `skyrl plan`",
        shown_by=lambda record: any(
            part.get("plan_bytes") and part.get("device_bytes") for part in record["parts"].values()
        ),
        tests=("tests/learners/test_memory_estimates.py::test_each_phase_takes_what_was_estimated",),
    ),
    CudaPath(
        name="digests of weights on the GPU",
        shown_by=_part_of("tests", *_VLLM_RUNS),
        tests=("tests/inference/test_checksums.py::test_it_is_the_sum_of_splitmix64_over_words_and_their_places",),
    ),
    CudaPath(
        name="embedded engine",
        shown_by=_part_of("generation", "smollm2.embedded", "step.embedded", having="embedded"),
        tests=("tests/inference/test_fused_decoder.py::"
               "test_fused_weights_without_packing_give_the_logprobs_of_a_full_forward_pass",),
    ),
    CudaPath(
        name="CUDA graphs and pages of the embedded engine",
        shown_by=_part_of("generation", having="embedded"),
        tests=("tests/inference/test_paged_decoder.py::"
               "test_weights_replaced_in_place_are_seen_without_another_recording",),
    ),
    CudaPath(
        name="vLLM on Ray, one GPU shared with the learner",
        shown_by=_part_of(*_VLLM_RUNS),
        tests=("tests/experiments/test_shared_models.py::test_engines_of_vllm_get_the_weights_of_every_layout",),
    ),
    CudaPath(
        name="CUDA graphs of vLLM",
        shown_by=_part_of(*_VLLM_RUNS),
        tests=("tests/inference/test_vllm_arguments.py::test_what_a_cpu_cannot_do_is_refused_there_only",),
    ),
    CudaPath(
        name="sleep of level 2 and waking of vLLM, in one process (`async_engine = false`)",
        shown_by=_part_of(*_VLLM_RUNS),
        tests=("tests/inference/test_vllm_stepped.py::test_sleep_frees_weights_and_cache_and_keeps_or_ends_requests",),
    ),
    CudaPath(
        name="CUDA IPC from learner to engine",
        shown_by=_part_of("tests_vllm", *_VLLM_RUNS),
        tests=("tests/weight_sync/test_native.py::"
               "test_of_two_senders_through_cuda_ipc_the_first_ends_the_requests",
               "tests/inference/test_vllm_native.py::test_a_handle_survives_json"),
    ),
    CudaPath(
        name="NCCL from learner to engine on another GPU",
        shown_by=_nowhere,
        tests=("tests/weight_sync/test_native.py::"
               "test_the_only_sender_sends_through_nccl_and_ends_the_requests",
               "tests/weight_sync/test_vllm_roads.py::test_engines_agree_with_the_learner_after_every_update"),
    ),
    CudaPath(
        name="FP8 in vLLM (`engine_init_kwargs.quantization`)",
        shown_by=_nowhere,
        tests=("tests/inference/test_vllm_arguments.py::test_a_field_of_another_name_is_translated",),
    ),
    CudaPath(
        name="FSDP2",
        shown_by=_part_of("strategies.fsdp2"),
        tests=("tests/learners/test_strategies.py::test_five_steps_are_those_of_one_process",),
    ),
    CudaPath(
        name="DeepSpeed",
        shown_by=_part_of("strategies.deepspeed"),
        tests=("tests/learners/test_strategies.py::test_five_steps_are_those_of_one_process",),
    ),
    CudaPath(
        name="Megatron",
        shown_by=_part_of("strategies.megatron"),
        tests=("tests/learners/test_megatron.py::test_five_steps_are_those_of_one_process",),
    ),
)  # fmt: skip


def table(records: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """A row for each path: where it ran last, or that it did not."""
    seen = sorted(records, key=lambda record: str(record["date"]), reverse=True)
    yield "| code | ran on | tried on a CPU by |"
    yield "|---|---|---|"
    for path in PATHS:
        record = next((record for record in seen if path.shown_by(record)), None)
        day = record["date"].partition(" ")[0] if record else ""
        ran = f"{record['device']}, {day}, {record['commit']}" if record else "no GPU yet"
        tests = ", ".join(f"`{test}`" for test in path.tests) or "no test"
        yield f"| {path.name} | {ran} | {tests} |"
