"""AIME: competition problems with short answers, compared after the normalisation of Minerva (arXiv:2206.14858,
appendix D.1).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from skyrl.envs.builtin.multiply import last_boxed
from skyrl.envs.env import Env, EnvStep
from skyrl.envs.rows import ground_truth

TAIL = 300
"""Number of characters at the end of an answer that are examined; no pattern below sees more."""

INVALID = "[INVALID]"

_ANSWER = re.compile(r"answer\s*:\s*([^\n<]+)", re.IGNORECASE)
"""An answer ends with its line or before a `<`: a tag or an end-of-turn token is no part of it."""

_REPLACED = (
    *(("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), (r"\ ", ""), (" ", ""), ("mbox", "text")),
    *((",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}")),
)
_REMOVED = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points"),
    *("feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students"),
    *("childrentickets", "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3"),
    *("\\text{\n}", "\\text{}", r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', "\\dots"),
)


class AIMEEnv(Env):
    r"""1 if the last `Answer:` in the last 300 characters is the ground truth, else -1; one turn.

    With `equal` (`math_equal.py`), an otherwise wrong answer is also right if its last `\boxed{}` is mathematically
    equal to the ground truth.
    """

    def __init__(self, extras: Mapping[str, Any], equal: Callable[[str, str], bool] | None = None) -> None:
        super().__init__(extras)
        self._equal = equal
        self._ground_truth: str = ground_truth(extras, "aime")
        self._right = False

    def step(self, action: str) -> EnvStep:
        read = prediction(action)
        self._right = read == normalized(self._ground_truth)
        if not self._right and self._equal and (boxed := last_boxed(action)) is not None:
            self._right = self._equal(boxed, self._ground_truth)
        return EnvStep(reward=1.0 if self._right else -1.0, done=True, answer=None if read == INVALID else read)

    def get_metrics(self) -> dict[str, float]:
        return {"acc": float(self._right)}


def prediction(answer: str) -> str:
    """The last `Answer: ...` in the last 300 characters, normalised; `[INVALID]` if there is none."""
    result = _ANSWER.findall(answer[-TAIL:])
    return normalized(result[-1]) if result else INVALID


def normalized(answer: str) -> str:
    """One spelling for the same short mathematical answer: what follows the last `=`, without units and markup.

    The rules and their order are those of SkyRL-Gym's aime: words around a box are kept, so an answer with two numbers
    does not match the boxed one.
    """
    text = answer.split("=")[-1]
    for old, new in _REPLACED:
        text = text.replace(old, new)
    for word in _REMOVED:
        text = text.replace(word, "")
    dollars = text.split("$", 2)
    text = f"${dollars[1]}$" if len(dollars) == 3 else text
    for command in ("text", "textbf", "overline"):
        text = re.sub(rf"\\{command}\{{([^}}\n]{{0,{TAIL}}})\}}", r"\1", text)
    # what lies between the first `\boxed{` and the last `}` replaces the box
    before, box, rest = text.partition("\\boxed{")
    inside, brace, after = rest.rpartition("}")
    text = before + inside + after if box and brace else text
    text = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", text)
    text = re.sub(r"sqrt([^{])", r"sqrt{\1}", text).replace("$", "")
    return (text.replace(",", "") if text.replace(",", "").isdigit() else text).strip()
