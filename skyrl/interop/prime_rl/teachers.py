"""prime-rl's distillation: `opd`, the reverse KL from a served teacher, and `opsd`, from the policy with an example.

Both are the advantage log nu - log pi of each sampled token, alone (src/prime_rl/trainer/rl/loss.py, `ref_kl_loss_fn`).
"""

from __future__ import annotations

import re
from typing import Any

from skyrl.interop.prime_rl.keys import url_of
from skyrl.interop.translation import (
    ALGORITHM,
    Dependent,
    Translation,
    Values,
    redundant,
    refused,
    unsupported,
)

_OURS = ALGORITHM + "distillation."
_SERVER = "trainer.teacher.endpoint."
_OF_SOURCE = re.compile(r"orchestrator\.train\.source\[(\d+)\]\.algo\.(.+)")
_ALGO = "orchestrator.algo."
_TEMPLATE = "Here is an example of an expert response:\n<demonstration>\n{demonstration}\n</demonstration>"
_DRIFT = (
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
            return Translation(writes={**_ALONE, **hint}, note=_DRIFT)
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
        return Translation(writes=_ALONE, note=_DRIFT)
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
