"""Probes of supervised runs: rows, order, passes, and what a run keeps. Their model is probed in `models.py`."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import nn

from skyrl.config.derive.supervised_rules import MODEL
from skyrl.config.loading.stored import stored_tree
from skyrl.config.loading.supervised_kinds import REFERENCE
from skyrl.errors import ResumeError, RunError, UserError
from skyrl.experiments.experiment import experiment_class
from skyrl.learners.workers.group import ScorerGroup
from skyrl.learners.workers.roles import SFTTeacherWorker
from skyrl.models.files.loading import load_causal_lm
from skyrl.processes.handles import Group
from skyrl.processes.in_process import LocalHandle
from skyrl.runs.recovery import attempts
from skyrl.runs.resume import beginning
from skyrl.runs.run_lock import refuse_changed
from skyrl.runs.session import RunSession
from skyrl.tree import evolve_at, get_at
from tests.effects.boundaries import Reached, given_to_deepspeed, learner_of, read_once, worker_of
from tests.effects.models import PREFERENCE_PLACE, REWARD_PLACE, SFT_PLACE, batch_for
from tests.effects.observables import alarms, callbacks, plain, planned_steps, run, trackers, what_is_left
from tests.effects.passes import fusions_of, noted_activations, tokenizer
from tests.effects.placement import processes
from tests.effects.probe import Observable, Probe, Scene, observable
from tests.effects.services import IN_WANDB, PROBED, asked

Values = dict[str, Any]

TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
CHAT = ("ab", "AB", "c", "CCCC")
OTHER = ("x", "Y", "zz", "ZZ")
TEMPLATE = (
    "{% if tools %}{{ tools | length }} tools<|end|>{% endif %}{% if loud %}loud<|end|>{% endif %}"
    "{% for message in messages %}{{ message['role'][0] }}:{{ message['content'] }}<|end|>{% endfor %}"
)


def messages(words: tuple[str, ...]) -> list[dict[str, str]]:
    """Turns of a user and an assistant, one after the other."""
    return [{"role": ("user", "assistant")[index % 2], "content": word} for index, word in enumerate(words)]


def rows_of(kind: str) -> list[Values]:
    """Rows with a second column for every one that a field can name; the last is longer than the others."""
    common = {"functions": [TOOL], "rules": "obey"}
    if kind == "sft":
        chats = [CHAT, CHAT[:2], ("ab", "A" * 24)]
        return [{"messages": messages(words), "chat": messages(OTHER), **common} for words in chats]
    sides = {"prompt": "ab", "chosen": "xyz", "rejected": "m", "margin": 0.5, "completion": "xy", "label": True}
    sides |= {"ranked": ["x", "yy", "z"], "order": [2, 1, 3], "points": [1, 2, 3]}
    others = {"ask": "cd", "better": "yy", "worse": "oo", "by": 0.25, "good": False}
    return [{**sides, **others, **common, "chosen": "x" * length} for length in (2, 3, 24)]


def _of_length(kind: str, letters: int) -> Values:
    return {"messages": messages(("ab", "A" * letters))} if kind == "sft" else {"chosen": "x" * letters}


@contextmanager
def files(kind: str) -> Iterator[None]:
    """The working directory with `rows.jsonl`, `bad.jsonl`, which has a row without anything, and `template.jinja`."""
    lines = [json.dumps(row) for row in rows_of(kind)]
    Path("rows.jsonl").write_text("".join(f"{line}\n" for line in lines))
    Path("bad.jsonl").write_text("".join(f"{line}\n" for line in [*lines, "{}"]))
    long = [{**json.loads(lines[0]), **_of_length(kind, 80)}]  # the model has 64 positions
    Path("long.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in [*rows_of(kind), *long]))
    Path("template.jinja").write_text(TEMPLATE)
    yield


def _rows(scene: Scene, source: str) -> object:
    with files(scene.run.kind), redirect_stderr(StringIO()) as reported:
        try:
            experiment: Any = experiment_class(scene.run)(scene.run)
            experiment.check_inputs()
            dataset = experiment.load((source,))
        except UserError as error:
            return f"{type(error).__name__}: {error}"
    kept = sorted(str(path) for path in Path().iterdir())
    return [
        [row.to_bytes() for row in dataset.rows],
        dataset.tally.too_long,
        dataset.tally.cut,
        kept,
        reported.getvalue(),
    ]


@observable("the tokens that are learned of some rows, and what is reported", refuses=True)
def rows(scene: Scene) -> object:
    return _rows(scene, "rows.jsonl")


@observable("the tokens that are learned of rows of which one is bad", refuses=True)
def bad_rows(scene: Scene) -> object:
    return _rows(scene, "bad.jsonl")


@observable("the tokens that are learned of rows of which one is too long", refuses=True)
def long_rows(scene: Scene) -> object:
    return _rows(scene, "long.jsonl")


@observable("the training rows")
def training_rows(scene: Scene) -> object:
    with files(scene.run.kind):
        experiment: Any = experiment_class(scene.run)(scene.run)
        return [row.to_bytes() for row in experiment.train_dataset.rows]


@observable("the order of rows in the first two epochs")
def order(scene: Scene) -> object:
    with files(scene.run.kind):
        experiment: Any = experiment_class(scene.run)(scene.run)
        planned = experiment.get_order()
        return [planned.epoch(number).tolist() for number in range(2)]


@observable("the rows of the first five batches")
def drawn(scene: Scene) -> object:
    with files(scene.run.kind):
        experiment: Any = experiment_class(scene.run)(scene.run)
        sampler = experiment.get_sampler()
        return [list(sampler.draw(4, step)) for step in range(5)]


@observable("the rows of the first two batches")
def streamed(scene: Scene) -> object:
    with files(scene.run.kind):
        experiment: Any = experiment_class(scene.run)(scene.run)
        cursor = experiment.get_cursor()
        return [[row.to_bytes() for row in cursor.take()] for _ in range(2)]


@observable("the training steps that are planned for 33 rows")
def steps_of_an_odd_number(scene: Scene) -> object:
    experiment: Any = experiment_class(scene.run)(evolve_at(scene.run, "num_steps", None))
    experiment.train_dataset = range(33)
    return experiment.total_steps


@observable("a short run with these rows: its metrics, files and messages", long=True)
def run_with_rows(scene: Scene) -> object:
    with files(scene.run.kind):
        return what_is_left(scene)


@observable("the sizes of the model's inputs in an update, and how often its layers compute")
def passes(scene: Scene) -> object:
    learner, sizes, layers = learner_of(scene, MODEL), [], []

    def before(module: nn.Module, arguments: Any, named: Any) -> None:
        sizes.append(tuple(named["input_ids"].shape))

    inner: Any = learner.model
    inner.register_forward_pre_hook(before, with_kwargs=True)
    for name, module in inner.named_modules():
        if name.endswith(".mlp"):
            module.register_forward_pre_hook(lambda *_: layers.append(1))
    asyncio.run(learner.update(batch_for(scene)))
    return [sizes, len(layers)]


@observable("loss and measurements of a batch by another model than the reference")
def compared(scene: Scene) -> object:
    rows = [{"prompt": "ab", "completion": word, "label": bool(index % 2)} for index, word in enumerate(CHAT)]
    Path("out").mkdir(exist_ok=True)
    Path("out/labelled.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows * 2))
    experiment: Any = experiment_class(scene.run)(scene.run)
    other = evolve_at(scene.run, "model.init_from_scratch", True)
    experiment.learner = worker_of(evolve(scene, run=other), MODEL)
    if scene.run.compares:
        experiment.reference = worker_of(scene, REFERENCE)
    batch = asyncio.run(experiment.complete(batch_for(scene)))
    return plain(asyncio.run(experiment.learner.forward_backward(batch, experiment.get_objective())))


@observable("loss and measurements of a batch beside a teacher")
def taught(scene: Scene) -> object:
    experiment: Any = experiment_class(scene.run)(scene.run)
    learner: Any = worker_of(scene, MODEL)
    if scene.run.distillation.teacher_path is not None:
        with read_once():
            worker: Any = SFTTeacherWorker(scene.run)
        experiment.teacher = ScorerGroup(Group([LocalHandle("teacher", worker)]))
    batch = asyncio.run(experiment.complete(batch_for(scene)))
    return plain(asyncio.run(learner.forward_backward(batch, experiment.get_objective())))


@observable("the loss of the rows' own tokens")
def own_tokens(scene: Scene) -> object:
    experiment: Any = experiment_class(scene.run)(scene.run)
    batch, objective = batch_for(scene), experiment.get_objective()
    loss, _, _ = objective(torch.ones(batch.input_ids.shape), objective.weigh(batch))
    return plain(loss)


@observable("the server that scores rows, and how it is asked")
def asked_teacher(scene: Scene) -> object:
    teacher = experiment_class(scene.run)(scene.run).teacher  # type: ignore[attr-defined]  # of SFTExp alone
    if teacher is None:
        return None
    server = teacher.server
    return [server.url, server._protocol, server._timeout, server._connection._most]


@observable("the folders in which log-probabilities of the reference are stored")
def stored_reference(scene: Scene) -> object:
    experiment: Any = experiment_class(scene.run)(scene.run)
    experiment.reference = worker_of(scene, REFERENCE)
    with redirect_stderr(StringIO()):
        asyncio.run(experiment.prepare())
    return sorted({str(file.parent) for file in Path().rglob("*.f32")})


@observable("whether the inputs of recomputed layers may wait on the host")
def waiting_activations(scene: Scene) -> object:
    with noted_activations() as dimensions:
        asyncio.run(learner_of(scene, MODEL).update(batch_for(scene)))
    return bool(dimensions)


@observable("the device of the model, or why it is not there")
def device(scene: Scene) -> object:
    try:
        experiment_class(scene.run)(scene.run)  # as in a run, nothing is replaced here
        load_causal_lm(
            str(scene.nano / "model"), dtype=torch.float32, attention="sdpa", device=torch.device(scene.run.device)
        )
    except UserError as error:
        return str(error)
    return scene.run.device


@observable("the attention that transformers is asked for")
def attention(scene: Scene) -> object:
    def load(path: str, *, attention: str, **_: Any) -> nn.Module:
        raise Reached(attention)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.effects.boundaries._copy", load)
        try:
            worker_of(scene, MODEL)
        except Reached as stop:
            return stop.arguments
    return None


@observable("the type in which the layers of the model are fused")
def fused_layers(scene: Scene) -> object:
    return fusions_of(scene.run, scene.run)


@observable("whether activations are computed again, as it is derived")
def recomputes(scene: Scene) -> object:
    return scene.run.recompute_activations


@observable("whether torch computes deterministically")
def determinism(scene: Scene) -> object:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        worker_of(scene, MODEL)
        return torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(before)


@observable("where a run begins, and how often a failing one does")
def beginnings(scene: Scene) -> object:
    tried = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("skyrl.runs.recovery.PAUSE", 0.0)
        try:
            for attempt in attempts(scene.run):
                with attempt, redirect_stderr(StringIO()):
                    tried += 1
                    raise RunError("no")
        except RunError:
            pass
    trainer = scene.run.trainer
    return [tried, trainer.resume_path, beginning(scene.run, restarted=False), beginning(scene.run, restarted=True)]


@observable("whether a checkpoint of a run with another learning rate is resumed from")
def changed(scene: Scene) -> object:
    path = "optimizer_config.lr"
    other = evolve_at(scene.run, path, 2 * get_at(scene.run, path))
    try:
        refuse_changed(stored_tree(other), scene.run, "a checkpoint", "ckpt_path")
    except ResumeError:
        return "refused"
    return "resumed"


@observable("the deadline of the run, and its distance from the grace period's")
def deadline(scene: Scene) -> object:
    shutdown = experiment_class(scene.run)(scene.run).shutdown
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("skyrl.processes.shutdown.time.monotonic", lambda: 0.0)
        left = shutdown.seconds_left
    return [math.isfinite(left), shutdown._grace]


@observable("what watches for stalls, and what a stall does")
def watch(scene: Scene) -> object:
    limits: list[object] = []

    class Watch:
        def __init__(self, progress: object, seconds: float, *, on_stall: Any, **_: object) -> None:
            on_stall("nothing moves")
            limits.append(seconds)

        def close(self) -> None:
            """Nothing was started."""

    session = RunSession(experiment_class(scene.run)(scene.run))
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(StringIO()):
        patch.setattr("skyrl.runs.session.Watchdog", Watch)
        session._watch_progress()
    return [limits, session._shutdown.requested]


WRITTEN: Values = {"chat_template.name_or_path": "template.jinja", "chat_template.source": "file"}
EVALUATED: Values = {"eval_datasets": ["out/train.jsonl"]}
TWICE: Values = {"train_datasets": ["out/train.jsonl", "out/train.jsonl"]}

BESIDE_TEACHER: Values = {"distillation.teacher_path": "{nano}/mixture"}
OF_LIKELY: Values = {**BESIDE_TEACHER, "distillation.top_k": 3}
SERVED_TEACHER: Values = {"distillation.endpoint.url": "http://here:8000", "distillation.top_k": 3}

BOTH: Values = {**TWICE, "curriculum.mixture": [{"weights": [1.0, 1.0]}]}
MIXED: Values = {**BOTH, "curriculum.sampler": "mixture"}
STAGED: Values = {**BOTH, "curriculum.sampler": "schedule", "curriculum.stages": [{"sampler": "permutation"}]}

COMMON: tuple[tuple[str, Any, Observable, Values], ...] = (
    ("strategy", "deepspeed", Observable("what DeepSpeed gets", lambda it: given_to_deepspeed(it, MODEL)), {}),
    ("faults.stop_before", "2099-01-01", deadline, {}),
    ("faults.grace_period_seconds", 5.0, deadline, {}),
    ("faults.stall_timeout_seconds", 5.0, watch, {}),
    ("faults.on_stall", "stop", watch, {}),
    ("train_datasets", TWICE["train_datasets"], training_rows, {}),
    ("train_dataset_weights", [1.0, 3.0], order, TWICE),
    ("sampler", "sequential", order, {}),
    ("curriculum.sampler", "tests.effects.own:Window", drawn, {}),
    ("curriculum.sampler_kwargs", {"window": 3}, drawn, {"curriculum.sampler": "tests.effects.own:Window"}),
    ("curriculum.mixture", [{"weights": [0.0, 1.0]}], drawn, MIXED),
    ("curriculum.stages", [{"sampler": "mixture"}], drawn, STAGED),
    ("seed", 1, order, {}),
    ("bad_rows", "skip", bad_rows, {}),
    ("max_length", 16, rows, {}),
    ("tokenized_path", "tokens", rows, {}),
    ("streaming", True, streamed, {"num_steps": 3}),
    ("shuffle_buffer_size", 1, streamed, {"streaming": True, "num_steps": 3}),
    ("disable_fast_tokenizer", True, rows, {}),
    ("tokenizer_path", "{nano}/other", tokenizer, {}),
    ("chat_template.name_or_path", "template.jinja", rows, {"chat_template.source": "file"}),
    ("chat_template.source", "file", rows, {"chat_template.name_or_path": "template.jinja"}),
    ("chat_template_kwargs", {"loud": True}, rows, WRITTEN),
    ("tools_key", "functions", rows, WRITTEN),
    ("system_key", "rules", rows, WRITTEN),
    ("num_epochs", 0, planned_steps, {}),
    ("epoch_tail", "short", steps_of_an_odd_number, {}),
    ("num_dummy_steps", 3, planned_steps, {}),
    ("num_steps", 1, planned_steps, {}),
    ("max_training_samples", 8, planned_steps, {}),
    ("batch_size", 16, run, {}),
    ("micro_train_batch_size_per_gpu", 1, passes, {}),
    ("max_tokens_per_microbatch", 8, passes, {}),
    ("use_sequence_packing", False, passes, {}),
    ("recompute_activations", True, passes, {}),
    ("offload_activations", True, waiting_activations, {"recompute_activations": True}),
    ("device", "cuda", device, {}),
    ("attention", "eager", attention, {}),
    ("flash_attn", False, attention, {"device": "cuda"}),
    ("gradient_checkpointing", False, recomputes, {"device": "cuda"}),
    ("use_liger_kernel", True, fused_layers, {"device": "cuda", "attention": "sdpa"}),
    ("deterministic", False, determinism, {}),
    ("profile_steps", [1], run, {}),
    ("record_memory", True, run, {"profile_steps": [1]}),
    ("logger", "tensorboard", trackers, {}),
    ("alarms", [{"metric": "eval/all/loss", "when": "stalls"}], alarms, {}),
    ("callbacks", ["tests.effects.own:Heard"], callbacks, {}),
    ("project_name", "other", asked, IN_WANDB),
    *((path, value, asked, where) for path, value, where in PROBED),
    ("resume_from", "", beginnings, {}),
    ("recover_mode", "fault", beginnings, {}),
    ("recover_retries", 1, beginnings, {"recover_mode": "auto"}),
    ("resume_with_changes", True, changed, {}),
    ("log_path", "elsewhere", processes, {"placement.executor": "ray"}),
    ("eval_before_train", True, run, EVALUATED),
    ("eval_interval", 1, run, EVALUATED),
    ("eval_datasets", ["rows.jsonl"], run_with_rows, {**EVALUATED, "eval_before_train": True}),
    ("eval_dataset_names", ["held_out"], run, {**EVALUATED, "eval_before_train": True}),
    ("ckpt_path", "elsewhere", run, {"ckpt_interval": 1}),
    ("ckpt_interval", 1, run, {}),
    ("max_ckpts_to_keep", 1, run, {"ckpt_interval": 1}),
    ("hf_save_interval", 1, run, {}),
    ("export_path", "elsewhere", run, {"hf_save_interval": 1}),
    ("run_path", "elsewhere", run, {}),
    ("run_name", "other", run, {"run_path": None}),
)
"""Field, value, what is seen, and where."""

LABELLED: Values = {"train_datasets": ["out/labelled.jsonl"]}

OWN: dict[str, tuple[tuple[str, Any, Observable, Values], ...]] = {
    "sft": (
        ("too_long", "truncate", long_rows, {}),
        ("train_on_what", "all_assistant_messages", rows, {}),
        ("messages_key", "chat", rows, {}),
        ("distillation.stored", True, rows, {}),
        ("distillation.teacher_path", "{nano}/mixture", taught, {}),
        ("distillation.coef", 2.0, taught, BESIDE_TEACHER),
        ("distillation.task_coef", 0.0, own_tokens, BESIDE_TEACHER),
        ("distillation.beta", 0.5, taught, BESIDE_TEACHER),
        ("distillation.top_k", 3, taught, BESIDE_TEACHER),
        ("distillation.temperature", 2.0, taught, BESIDE_TEACHER),
        ("distillation.max_divergence", 0.001, taught, BESIDE_TEACHER),
        ("distillation.tail", False, taught, {**OF_LIKELY, "distillation.beta": 0.0}),
        ("distillation.min_logprob", -2.0, taught, OF_LIKELY),
        ("distillation.endpoint.url", "http://there:8000", asked_teacher, {"distillation.top_k": 3}),
        ("distillation.endpoint.protocol", "sglang", asked_teacher, SERVED_TEACHER),
        ("distillation.endpoint.timeout", 5.0, asked_teacher, SERVED_TEACHER),
        ("distillation.endpoint.max_requests", 2, asked_teacher, SERVED_TEACHER),
    ),
    "preference": (
        ("chosen_key", "better", rows, {}),
        ("rejected_key", "worse", rows, {}),
        ("prompt_key", "ask", rows, {}),
        ("loss_type", ["hinge"], compared, {}),
        ("loss_weights", [1.0, 0.5], compared, {"loss_type": ["sigmoid", "sft"]}),
        ("beta", 0.3, compared, {}),
        ("label_smoothing", 0.2, compared, {}),
        ("f_divergence_type", "forward_kl", compared, {}),
        ("f_alpha_divergence_coef", 0.7, compared, {"f_divergence_type": "alpha_divergence"}),
        ("ld_alpha", 0.5, compared, {}),
        ("discopop_tau", 1.0, compared, {"loss_type": ["discopop"]}),
        ("simpo_gamma", 1.0, compared, {"loss_type": ["simpo"]}),
        ("desirable_weight", 2.0, compared, {**LABELLED, "loss_type": ["kto"]}),
        ("undesirable_weight", 2.0, compared, {**LABELLED, "loss_type": ["kto"]}),
        ("completion_key", "better", rows, {"loss_type": ["kto"]}),
        ("label_key", "good", rows, {"loss_type": ["kto"]}),
        ("use_weighting", True, compared, {}),
        ("answers_key", "ranked", rows, {"ranks_key": "order"}),
        ("ranks_key", "order", rows, {"answers_key": "ranked"}),
        ("scores_key", "points", rows, {"answers_key": "ranked"}),
        ("num_answers", 3, rows, {"answers_key": "ranked", "ranks_key": "order"}),
        ("sync_ref_model", True, run, {"ref_model_sync_steps": 1}),
        ("ref_model_sync_steps", 1, run, {"sync_ref_model": True}),
        ("ref_model_mixup_alpha", 0.9, run, {"sync_ref_model": True, "ref_model_sync_steps": 1}),
        ("reference_free", True, compared, {}),
        ("ref_model_path", "{nano}/mixture", compared, {}),
        ("precompute_ref_log_probs", True, stored_reference, {}),
        ("ref_log_probs_path", "elsewhere", stored_reference, {"precompute_ref_log_probs": True}),
    ),
    "reward_model": (
        ("chosen_key", "better", rows, {}),
        ("rejected_key", "worse", rows, {}),
        ("prompt_key", "ask", rows, {}),
        ("margin_key", "by", rows, {}),
    ),
}

WRITTEN_DTYPE: Values = {"strategy": "deepspeed", "device": "cuda", "attention": "sdpa"}

PROBES: tuple[Probe, ...] = (
    *(Probe(path, value, seen_in, context, "sft") for path, value, seen_in, context in (*COMMON, *OWN["sft"])),
    *(
        Probe(path, value, evolve(seen_in, long=True), context, kind)  # by the same code
        for kind in ("reward_model", "preference")
        for path, value, seen_in, context in COMMON
    ),
    *(
        Probe(path, value, seen_in, context, kind)
        for kind in ("reward_model", "preference")
        for path, value, seen_in, context in OWN[kind]
    ),
    *(
        probe
        for place in (SFT_PLACE, REWARD_PLACE, PREFERENCE_PLACE)
        for probe in (
            place.probe("faults.on_non_finite", "skip", place.sights.left_out()),
            place.probe("compute_dtype", "bfloat16", place.sights.scored()),
            place.probe("bf16", False, place.sights.deepspeed(), WRITTEN_DTYPE),
        )
    ),
)
