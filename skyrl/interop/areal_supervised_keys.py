"""The meaning of each setting of AReaL's SFT and RW experiments in our supervised trees; see `areal_keys.py`."""

from __future__ import annotations

from attrs import evolve

from skyrl.interop.areal_keys_2026 import KEYS_2026
from skyrl.interop.areal_learner_keys import LEARNER_KEYS, computed_in
from skyrl.interop.areal_rollout_keys import ROLLOUT_KEYS
from skyrl.interop.areal_values import (
    Becomes,
    Entry,
    goes_to,
    later,
    not_there,
    only,
    optimizer_keys,
    recovery,
    switches_on,
    turned_round,
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
_ENGINES = "nothing is generated"

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
    "*.experiment_name": not_there("names of the run are in one place: project_name and run_name"),
    "*.trial_name": not_there("names of the run are in one place: project_name and run_name"),
    "cluster.fileroot": goes_to("ckpt_path", convert=lambda value: f"{str(value).rstrip('/')}/checkpoints"),
    "*.fileroot": not_there("folders are in one place: run_path, ckpt_path and export_path"),
    "seed": goes_to("seed"),
    "total_train_epochs": goes_to("num_epochs"),
    "total_train_steps": goes_to("num_steps"),
    "total_train_n_seqs": goes_to("max_training_samples"),
    "tokenizer_path": unless_empty("tokenizer_path"),
    # the model
    "model.path": goes_to("model.path"),
    "model.init_from_scratch": switches_on("model.init_from_scratch", off="the weights are loaded"),
    "model.disable_dropout": turned_round("use_dropout", on="dropout is off by default"),
    "model.dtype": lambda value: computed_in(value, "bf16", ["fsdp_config."]),
    "model.gradient_checkpointing": goes_to("gradient_checkpointing"),
    "model.attn_impl": goes_to("attention"),
    "model.backend": not_there("allocation_mode decides, here as there"),
    "model.mb_spec.max_tokens_per_mb": goes_to("max_tokens_per_microbatch"),
    "model.mb_spec.n_mbs": only(1, None, does="no result depends on it", otherwise="a least number of micro-batches"),
    "model.mb_spec.granularity": not_there("both rows of a pair stay together anyway"),
    "model.pad_to_maximum": only(True, False, does="results do not depend on padding", otherwise="padding"),
    "model.grad_reduce_dtype": goes_to("fsdp_config.mixed_precision.reduce_dtype"),
    "model.ds_auto_tp": later("settings of a table as a whole"),
    "model.optimizer": lambda value: Becomes(refused="without an optimizer nothing is learned"),
    **optimizer_keys("model.optimizer.", "optimizer_config.", "fsdp_config.cpu_offload"),
    # rows
    "train_dataset.path": goes_to("train_datasets"),
    "valid_dataset.path": goes_to("eval_datasets"),
    "train_dataset.batch_size": goes_to("batch_size"),
    "valid_dataset.batch_size": not_there("no evaluation depends on it"),
    "train_dataset.max_length": goes_to("max_length"),
    "valid_dataset.max_length": later("a longest row for evaluation alone: max_length is for all"),
    "train_dataset.shuffle": goes_to("sampler", convert=lambda on: "random" if on else "sequential"),
    "valid_dataset.shuffle": not_there("evaluation takes every row; its order does not matter"),
    "train_dataset.drop_last": lambda drops: (
        Becomes(needless="training batches are whole") if drops else Becomes(writes={"epoch_tail": "short"})
    ),
    "valid_dataset.drop_last": only(False, does="evaluation takes every row", otherwise="leaving rows out"),
    "*_dataset.pin_memory": not_there("rows are small: there is no memory to pin"),
    "valid_dataset": later("settings of a table as a whole"),
    # keeping and watching
    "evaluator.eval_before_train": goes_to("eval_before_train"),
    "recover.mode": recovery("recover_mode"),
    "recover.retries": goes_to("recover_retries"),
    "stats_logger.trackio.*": later("Trackio as a tracker", "disabled"),
    # machines
    "cluster.cluster_name": not_there("it names no machine"),
    "launcher.*": later("settings of launchers beside those of docs/launching.md"),
    "scheduler.*": not_there("nothing is rewarded"),
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
