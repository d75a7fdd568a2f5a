"""Converts prime-rl's `rl.toml`: `keys.py` has the settings that convert independently, and this module those that
depend on others. Tasks are environments of verifiers, which have no counterpart that could be written: their lines are
refused, with what to set in their place.

Distillation is `opd`, the reverse KL from a served teacher, or `opsd`, from the policy with an example. Both are the
advantage log nu - log pi of each sampled token, alone (src/prime_rl/trainer/rl/loss.py, `ref_kl_loss_fn`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from attrs import evolve

from skyrl.interop import not_converted
from skyrl.interop.prime_rl.keys import KEYS, rate, url_of
from skyrl.interop.report import Conversion
from skyrl.interop.systems import System, convert_settings
from skyrl.interop.translation import (
    ALGORITHM,
    ENGINE,
    OPTIMIZER,
    SAMPLING,
    Dependent,
    Translation,
    Values,
    count,
    number,
    redundant,
    refused,
    unsupported,
)
from skyrl.interop.values import flat_file, is_script
from skyrl.interop.writing import Writing

_ANSWER = "orchestrator.train.sampling.max_completion_tokens"
_DEFAULTS: dict[str, Any] = {
    "orchestrator.batch_size": 128,
    "orchestrator.group_size": 1,
    "orchestrator.max_off_policy_steps": 8,
    "orchestrator.algo.type": "grpo",
    "trainer.optim.type": "adamw",
    "trainer.optim.lr": 1e-6,
    "trainer.optim.weight_decay": 0.01,
    "trainer.optim.max_norm": 1.0,
    "trainer.scheduler.type": "constant",
    "trainer.loss.type": "default",
    "trainer.loss.dppo_mask_low": 0.2,
    "trainer.loss.dppo_mask_high": 0.2,
    "deployment.num_train_gpus": 1,
    "deployment.num_infer_gpus": 1,
    "seq_len": 2048,
}
"""Settings that change what is learned or where, with prime-rl's defaults."""

_DRIFT = (
    "prime-rl adds trainer.loss.kl_tau (1e-3 by default) x the square of each token's log-ratio to the engine to the "
    "loss; here there is no such term."
)
_TASK = "The rows of a data source need its name in their column data_source, by which its teacher is found."


def convert_prime_rl(name: str) -> Conversion:
    """Convert a TOML file of prime-rl's `rl`. Raises `ConfigError` if it cannot be read or is another one."""
    if is_script(name):
        raise not_converted(name, "is a script, which is not read", "convert the TOML file that it names after @")
    keys = flat_file(name, of="prime-rl")
    if not any(key.startswith("orchestrator") for key in keys):
        raise not_converted(name, "has no table orchestrator", "only files of prime-rl's `rl` are converted")
    return convert_keys(keys, name)


def convert_keys(keys: Values, where: str = "arguments") -> Conversion:
    """Convert prime-rl's settings, given by their dotted keys."""
    system = System(
        keys=KEYS,
        dependent=(TEACHERS, _DEPENDENT),
        unknown=lambda key, writing: "not a setting of prime-rl's rl.toml of August 2026",
        defaults=_left_out,
        implied=_implied,
    )
    converted = convert_settings(system, keys, Writing(where))
    remarks = [_TASK] if teachers_by_source(keys) else []
    if keys.get("orchestrator.algo.type", "grpo") in ("grpo", "max_rl"):
        remarks.append(_DRIFT)
    return evolve(converted, remarks=tuple(remarks))


def _left_out(values: Values) -> Values:
    known = {key: value for key, value in _DEFAULTS.items() if key not in values}
    if "orchestrator.token_batch_size" in values:
        known.pop("orchestrator.batch_size", None)
    return {**known, **hint_by_default(values)}


def _samples(key: str, value: object, values: Values) -> Translation:
    """Convert the batch, which prime-rl counts in samples."""
    group = count(values.get("orchestrator.group_size"))
    if not isinstance(value, int) or value % group:
        return refused(f"{value} samples are no whole number of groups of {group}")
    prompts = value // group
    return Translation(
        writes={"trainer.train_batch_size": prompts, "trainer.policy_mini_batch_size": prompts},
        note=f"{prompts} prompts with {group} samples each",
    )


def _length(key: str, value: object, values: Values) -> Translation:
    """Convert the length of prompt and answer together."""
    answer = values.get(_ANSWER)
    if not isinstance(answer, int) or not isinstance(value, int) or answer >= value:
        return unsupported(
            "a bound of prompt and answer together: set trainer.max_prompt_length and "
            "generator.sampling_params.max_generate_length"
        )
    return Translation(writes={"trainer.max_prompt_length": value - answer}, note=f"without the {answer} of an answer")


def _betas(key: str, value: object, values: Values) -> Translation:
    second = 0.95 if values.get("trainer.optim.type") == "muon" else 0.999
    betas = [number(values.get(f"trainer.optim.betas{n}", default)) for n, default in ((1, 0.9), (2, second))]
    return Translation(writes={OPTIMIZER + "adam_betas": betas})


def _schedule(key: str, value: object, values: Values) -> Translation:
    kind = values.get("trainer.scheduler.type")
    match key.removeprefix("trainer.scheduler."):
        case "type":
            names = {"constant": "constant", "linear": "warmup_stable_decay", "cosine": "cosine"}
            if str(value) not in names:
                return unsupported(f"the schedule {value}")
            writes: dict[str, Any] = {OPTIMIZER + "scheduler": names[str(value)]}
            if value != "constant":
                writes[OPTIMIZER + "num_warmup_steps"] = values.get("trainer.scheduler.warmup_steps", 10)
            if value == "linear":
                writes[OPTIMIZER + "num_decay_steps"] = values.get("trainer.scheduler.decay_steps", 10) or None
            return Translation(writes=writes)
        case "warmup_steps" | "decay_steps":
            return redundant("written with the schedule" if kind != "constant" else "no effect on a constant rate")
        case "min_lr":
            share = rate(value, values.get("trainer.optim.lr"))
            return Translation(writes={OPTIMIZER + "min_lr_ratio": share})
    return unsupported("this setting of a schedule")


def _gpus(key: str, value: object, values: Values) -> Translation:
    tensor = count(values.get("inference.vllm.tensor_parallel_size")) * count(
        values.get("inference.vllm.data_parallel_size")
    )
    several = values.get("deployment.type") == "multi_node"
    match key.removeprefix("deployment."), several:
        case ("num_train_gpus", False) | ("gpus_per_node", True):
            return Translation(writes={"trainer.placement.policy_num_gpus_per_node": value})
        case "num_infer_gpus", False:
            return Translation(writes={ENGINE + "num_engines": max(1, count(value) // tensor)})
        case ("num_train_gpus" | "num_infer_gpus", True) | ("gpus_per_node", False):
            return redundant("not read in this deployment")
        case "num_train_nodes", _:
            return Translation(writes={"trainer.placement.policy_num_nodes": value})
        case "num_infer_nodes" | "num_infer_replicas", _:
            nodes = count(values.get("deployment.num_infer_nodes")) * count(values.get("deployment.num_infer_replicas"))
            engines = nodes * count(values.get("deployment.gpus_per_node"), default=8) // tensor
            return Translation(writes={ENGINE + "num_engines": max(1, engines)})
    return unsupported("this setting of a deployment")


_OURS = ALGORITHM + "distillation."
_SERVER = "trainer.teacher.endpoint."
_OF_SOURCE = re.compile(r"orchestrator\.train\.source\[(\d+)\]\.algo\.(.+)")
_ALGO = "orchestrator.algo."
_TEMPLATE = "Here is an example of an expert response:\n<demonstration>\n{demonstration}\n</demonstration>"
_DRIFT_OF_TEACHERS = (
    "prime-rl adds 1e-3 x the square of the log-ratio to the engine, and keeps tokens that the teacher prefers "
    "whatever their probability has become; here the loss of the policy decides"
)
_ALONE: dict[str, Any] = {_OURS + "type": "advantage", _OURS + "task_coef": 0.0}


def teacher(key: str, value: object, values: Values) -> Translation | None:
    """Convert a setting of the algorithm of all sources, if it is one of a teacher."""
    kind, setting = values.get(_ALGO + "type"), key.removeprefix(_ALGO)
    match kind, setting:
        case (("opd" | "opsd"), "type"):
            hint = {_OURS + "self_teacher": True, _OURS + "hint.source": "column"} if kind == "opsd" else {}
            return Translation(writes={**_ALONE, **hint}, note=_DRIFT_OF_TEACHERS)
        case "opd", "teacher.base_url":
            return Translation(writes={_SERVER + "url": url_of(value)})
        case "opd", _ if setting.startswith("teacher."):
            return _server_setting(setting.removeprefix("teacher."), value)
        case "opsd", "demo_key":
            return Translation(writes={_OURS + "hint.column": value})
        case "opsd", "template":
            return _template(value)
        case "opsd", _ if setting.startswith("renderer"):
            return redundant("the chat template of the policy renders the demonstration")
    return None


def of_source(key: str, value: object, values: Values) -> Translation | None:
    """Convert a setting of the algorithm of one source."""
    match = _OF_SOURCE.fullmatch(key)
    if match is None:
        return None
    if not has_teachers(values):
        return unsupported("an algorithm for each source, other than a teacher for each of them (opd)")
    if match[2] == "type":
        return Translation(writes=_ALONE, note=_DRIFT_OF_TEACHERS)
    if match[2] == "teacher.base_url":
        return redundant("written as trainer.teacher.endpoint.sources")
    return _server_setting(match[2].removeprefix("teacher."), value)


def has_teachers(values: Values) -> bool:
    """Whether every source has a teacher of its own."""
    numbers = {match[1] for key in values if (match := re.match(r"orchestrator\.train\.source\[(\d+)\]", key))}
    return bool(numbers) and all(
        values.get(f"orchestrator.train.source[{number}].algo.type") == "opd" for number in numbers
    )


def teachers_by_source(values: Values) -> dict[str, str]:
    """Name of each source with a teacher of its own -> address of the teacher's server."""
    result = {}
    for key, value in values.items():
        match = _OF_SOURCE.fullmatch(key)
        if match and match[2] == "teacher.base_url":
            source = f"orchestrator.train.source[{match[1]}]."
            name = values.get(source + "name") or values.get(source + "env.taskset.id")
            result[str(name)] = url_of(value)
    return result


def hint_by_default(values: Values) -> dict[str, str]:
    """Defaults of prime-rl for what a self-distilled policy reads."""
    if values.get(_ALGO + "type") != "opsd":
        return {}
    defaults = {"demo_key": "demonstration", "template": _TEMPLATE}
    return {_ALGO + name: value for name, value in defaults.items() if _ALGO + name not in values}


def _server_setting(setting: str, value: object) -> Translation:
    match setting:
        case "name":
            return redundant("the server is asked for its model")
        case "api_key_var":
            return redundant("the variable SKYRL_TEACHER_TOKEN holds the server's token")
        case "wait_for_ready_timeout":
            return Translation(writes={_SERVER + "timeout": value})
        case "skip_model_check":
            return redundant("only the address is needed")
    return unsupported(f"the setting {setting} of a teacher's server")


def _template(value: object) -> Translation:
    text = str(value)
    if text.count("{demonstration}") != 1:
        return refused("a text with {demonstration}, once")
    template = text.replace("{demonstration}", "{hint}") + "\n\n{prompt}"
    return Translation(
        writes={_OURS + "hint.template": template},
        note="before the question, in the user's message; there in a system message",
    )


TEACHERS: dict[str, Dependent] = {"orchestrator.algo.*": teacher, "orchestrator.train.source[[]*": of_source}
"""Settings of teachers."""


def _implied(values: Values) -> Iterator[tuple[str, str, Any]]:
    yield "prime-rl", "trainer.placement.colocate_all", False
    yield "prime-rl", "trainer.fully_async.enabled", True
    yield "prime-rl", "trainer.algorithm.loss_reduction", "token_mean"
    yield "prime-rl", "trainer.algorithm.use_kl_loss", False
    yield "prime-rl", SAMPLING + "top_p", 1.0
    if isinstance(values.get("max_steps"), int):
        yield "max_steps", "trainer.epochs", values["max_steps"]
    sources = teachers_by_source(values)
    if sources:
        yield "orchestrator.train.source", "trainer.teacher.endpoint.sources", sources


_DEPENDENT: dict[str, Dependent] = {
    "orchestrator.batch_size": _samples,
    "seq_len": _length,
    **dict.fromkeys(("trainer.optim.betas1", "trainer.optim.betas2"), _betas),
    "trainer.scheduler.*": _schedule,
    **dict.fromkeys(
        (
            "deployment.num_train_gpus", "deployment.num_infer_gpus", "deployment.gpus_per_node",
            "deployment.num_train_nodes", "deployment.num_infer_nodes", "deployment.num_infer_replicas",
        ),
        _gpus,
    ),
}  # fmt: skip
"""Settings whose meaning depends on others."""
