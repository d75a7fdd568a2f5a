"""The meaning of each setting of AReaL's SFT and RW experiments in our supervised trees; see `areal/keys.py`."""

from __future__ import annotations

from attrs import evolve

from skyrl.interop.areal.keys_2026 import KEYS_2026
from skyrl.interop.areal.learner_keys import LEARNER_KEYS, computed_in
from skyrl.interop.areal.rollout_keys import ROLLOUT_KEYS
from skyrl.interop.conversions import (
    Becomes,
    Entry,
    goes_to,
    inverted,
    later,
    not_there,
    only,
    optimizer_keys,
    recovery,
    switches_on,
    unless_empty,
)


def of_one_model(become: Becomes) -> Becomes:
    """A conversion of a policy setting, with its paths changed to those of a tree with one model."""
    writes = {path.removeprefix("trainer.").removeprefix("policy."): each for path, each in become.writes.items()}
    return evolve(become, writes=writes)


def _of_a_model(entry: Entry) -> Entry:
    """An entry for a policy setting, changed for a tree with one model."""
    return lambda value: of_one_model(Becomes(writes={entry: value}) if isinstance(entry, str) else entry(value))


_OF_EVERY_KIND = ("*.", "*_dataset.", "perf_tracer", "memory_profiler", "enable_offload", "saver.", "recover.")
_ENGINES = "supervised runs generate nothing"

INTERVALS = {
    "saver.freq_": "hf_save_interval",
    "recover.freq_": "ckpt_interval",
    "evaluator.freq_": "eval_interval",
}

COPIES = {
    "valid_dataset.max_length": "train_dataset.max_length",
}

KEYS: dict[str, Entry] = {
    "experiment_name": goes_to("project_name"),
    "trial_name": goes_to("run_name"),
    "*.experiment_name": not_there("names are set once: project_name and run_name"),
    "*.trial_name": not_there("names are set once: project_name and run_name"),
    "cluster.fileroot": goes_to("ckpt_path", convert=lambda value: f"{str(value).rstrip('/')}/checkpoints"),
    "*.fileroot": not_there("folders are set once: run_path, ckpt_path and export_path"),
    "seed": goes_to("seed"),
    "total_train_epochs": goes_to("num_epochs"),
    "total_train_steps": goes_to("num_steps"),
    "total_train_n_seqs": goes_to("max_training_samples"),
    "tokenizer_path": unless_empty("tokenizer_path"),
    # the model
    "model.path": goes_to("model.path"),
    "model.init_from_scratch": switches_on("model.init_from_scratch", off="pretrained weights are loaded"),
    "model.disable_dropout": inverted("use_dropout", on="dropout is off by default"),
    "model.dtype": lambda value: computed_in(value, "bf16", ["fsdp_config."]),
    "model.gradient_checkpointing": goes_to("gradient_checkpointing"),
    "model.attn_impl": goes_to("attention"),
    "model.backend": not_there("allocation_mode takes precedence, as in AReaL"),
    "model.mb_spec.max_tokens_per_mb": goes_to("max_tokens_per_microbatch"),
    "model.mb_spec.n_mbs": only(
        1, None, does="it does not affect results", otherwise="a minimum number of micro-batches"
    ),
    "model.mb_spec.granularity": not_there("both rows of a pair always stay together"),
    "model.pad_to_maximum": only(True, False, does="padding does not affect results", otherwise="other padding"),
    "model.grad_reduce_dtype": goes_to("fsdp_config.mixed_precision.reduce_dtype"),
    "model.ds_auto_tp": later("a value for a whole table; set its fields instead"),
    "model.optimizer": lambda value: Becomes(refused="training needs an optimizer"),
    **optimizer_keys("model.optimizer.", "optimizer_config.", "fsdp_config.cpu_offload"),
    # rows
    "train_dataset.path": goes_to("train_datasets"),
    "valid_dataset.path": goes_to("eval_datasets"),
    "train_dataset.batch_size": goes_to("batch_size"),
    "valid_dataset.batch_size": not_there("it does not affect evaluation results"),
    "train_dataset.max_length": goes_to("max_length"),
    "valid_dataset.max_length": later("a separate maximum length for evaluation; max_length applies to all rows"),
    "train_dataset.shuffle": goes_to("sampler", convert=lambda on: "random" if on else "sequential"),
    "valid_dataset.shuffle": not_there("evaluation uses every row, so order does not matter"),
    "train_dataset.drop_last": lambda drops: (
        Becomes(needless="incomplete batches are dropped by default")
        if drops
        else Becomes(writes={"epoch_tail": "short"})
    ),
    "valid_dataset.drop_last": only(False, does="evaluation uses every row", otherwise="dropping rows"),
    "*_dataset.pin_memory": not_there("rows are small, so pinned memory does not apply"),
    "valid_dataset": later("a value for a whole table; set its fields instead"),
    # keeping and watching
    "evaluator.eval_before_train": goes_to("eval_before_train"),
    "recover.mode": recovery("recover_mode"),
    "recover.retries": goes_to("recover_retries"),
    "stats_logger.trackio.*": later("the Trackio tracker", "disabled"),
    # machines
    "cluster.cluster_name": not_there("only a label"),
    "launcher.*": later("launcher settings beyond those in docs/launching.md"),
    "scheduler.*": not_there("supervised runs use no rewards"),
    "sglang.*": not_there(_ENGINES),
    "vllm.*": not_there(_ENGINES),
    "rollout.*": not_there(_ENGINES),
    "model.temperature": not_there(_ENGINES),
    **{
        key.replace("actor.", "model.", 1): _of_a_model(entry)
        for key, entry in (LEARNER_KEYS | ROLLOUT_KEYS | KEYS_2026).items()
        if key.startswith(("actor.", *_OF_EVERY_KIND)) and not key.startswith("actor.rejection_sampling")
    },
}
