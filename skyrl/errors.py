"""Every exception that skyrl raises on purpose, on one screen.

    SkyRLError                  anything below; the command prints its message, never a traceback
    +-- UserError               the user's input: exit code 2, nothing was started
    |   +-- ConfigError         the configuration: every problem at once, each with its place
    |   |   +-- UnknownFieldError   a field that a class does not have, given in Python: a TypeError, too
    |   +-- DataError           a dataset: the file, the row number, what was expected
    |   |   +-- DroppedPartsError   ... or a conversation of which the chat template drops parts
    |   |   +-- TextError       ... or a text that no tokenizer accepts: half of a UTF-16 pair (a lone surrogate)
    |   +-- ModelError          a model or tokenizer that cannot be loaded
    |   +-- TemplateTimeoutError    a chat template that does not finish
    |   +-- TaskError           an environment or reward function that cannot be found or used
    |   +-- ResumeError         a checkpoint or run folder that this run must not continue
    |   +-- RequestError        a request to the HTTP endpoint that is answered with an error status
    |   +-- ServerRefusal       a request that an inference server refuses: `status` is HTTP's
    +-- RunError                the run itself: exit code 1, what was saved stays
        +-- NonFiniteError      NaN or infinity where a finite number is required
        |   +-- BatchError      ... in a batch, before any update from it
        +-- RewardError         an environment or reward function that failed while it judged an answer
        +-- CallbackError       a callback that failed while it heard of an event
        +-- WeightSyncError     an engine that does not hold the learner's weights
        +-- StorageError        a disk that is full or broken
        +-- PassError           a pass of a training service that cannot be finished
        +-- ServiceGone         a service of environments that has been away for longer than the run waits
        +-- ProcessError        a process that could not be started, died, or gave no sign of life
            +-- ProcessLost     ... a rank or an engine that ran and is gone: `process` is its name
            +-- EngineFailed    ... an engine that gave the canary no usable answer: `number` and `cause`
            +-- NoRoomError     a cluster that has too few machines or GPUs free: `pool` is the pool without a place
            +-- WorkerEnded     a sandboxed worker that was late, said too much, or ended

    SkipSample                  not an error: an environment declines to judge a sample
    Stopped                     not an error: a run that was asked to stop; exit code 75, or 130 after Ctrl-C

A message says what is wrong, where, and what to do.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import attrs

ProblemCode = Literal[
    "", "unknown field", "misspelled field", "removed field", "no table", "not implemented", "not a choice"
]
"""Kind of a problem, for code that acts on it. No behaviour depends on the text of a message.

unknown field: no field of the class has a similar name. misspelled field: one has. removed field: an older version had
it. no table: the field exists, and no name leads on from it. not implemented: another system has the field. not a
choice: `value` is none of the values that the field allows.
"""

NO_SUCH_FIELD: frozenset[ProblemCode] = frozenset(
    ("unknown field", "misspelled field", "removed field", "no table", "not implemented")
)
"""Codes of the problems of a path that leads to no field, whatever value it would have."""


@attrs.frozen(kw_only=True)
class Problem:
    """One mistake in a configuration, or one warning about it.

    Example: `Problem(path="trainer.epochs", message="'two' is not a whole number", place="run.toml:14")`
    """

    path: str
    """Dotted path of the field, as the user would write it."""

    message: str
    """A sentence with the value found and the values allowed."""

    hint: str = ""
    """The remedy, when it is known."""

    location: str = ""
    """The place where the value was written: `file:line`, `argument 2`, or empty for a default."""

    severity: Literal["error", "warning"] = "error"
    """A warning does not stop a run, except under `--strict`."""

    code: ProblemCode = ""
    """Kind of the problem, where other code acts on it."""

    value: object = attrs.field(default=None, repr=False)
    """Value that was refused, for the code `not a choice`."""


class SkyRLError(Exception):
    """Raised on purpose; its message is complete without a traceback, and has no control characters."""

    exit_code = 1

    def __str__(self) -> str:
        return printable(super().__str__())


class UserError(SkyRLError):
    """Something the user gave cannot be used; nothing was started."""

    exit_code = 2


class ConfigError(UserError, ValueError):
    """A configuration that cannot run. `problems` lists everything that is wrong with it."""

    def __init__(self, problems: Iterable[Problem], title: str = "This run cannot start") -> None:
        self.problems = tuple(problems)
        self.title = title
        super().__init__(self.problems, title)

    def __str__(self) -> str:
        return render(self.problems, self.title)


class UnknownFieldError(ConfigError, TypeError):
    """A configuration class was built with a field that it does not have: `OptimizerConfig(learnin_rate=1)`."""


class DataError(UserError):
    """A dataset cannot be read as prompts."""


class DroppedPartsError(DataError):
    """A chat template drops parts of a conversation."""

    def __init__(self, message: str, tools: Iterable[str] = ()) -> None:
        """`tools` are the names of the tools that it drops."""
        self.tools = tuple(tools)
        super().__init__(message)


class TextError(DataError):
    """A text holds a lone surrogate, which is not a character, so no tokenizer accepts it."""


class ModelError(UserError):
    """A model or tokenizer cannot be loaded."""


class TemplateTimeoutError(UserError):
    """A chat template has computed for longer than any conversation takes."""


class TaskError(UserError):
    """An environment or reward function cannot be found or used."""


class ResumeError(UserError):
    """A checkpoint or run folder does not belong to this run."""


class RequestError(UserError):
    """A request to the HTTP endpoint is answered with `status` and a JSON error, and nothing is sampled for it."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        """`param` is the field of the body that is wrong; `code` a machine-readable word, by OpenAI's convention."""
        self.status, self.param, self.code = status, param, code
        super().__init__(message)


class ServerRefusal(UserError):
    """An inference server refuses a request: it lacks the route, wants a token, or finds a mistake in it."""

    def __init__(self, message: str, status: int) -> None:
        self.status = status
        super().__init__(message)


class RunError(SkyRLError):
    """A run that had started cannot continue."""


class NonFiniteError(RunError):
    """NaN or infinity would have reached an optimizer step."""


class BatchError(NonFiniteError):
    """NaN or infinity in a batch before any update from it: weights and optimizer are untouched."""


class StorageError(RunError):
    """A file of the run cannot be written: the disk is full, or fails."""


class RewardError(RunError):
    """An environment or reward function failed while it judged an answer."""


class CallbackError(RunError):
    """A callback failed while it heard of an event of the training loop."""


class PassError(RunError):
    """A pass of a training service cannot be finished, nor any other one after it: ranks wait for one that failed."""


class ServiceGone(RunError):
    """A service that environments need has been away for longer than the run waits for it. Not a sample's failure."""


class SkipSample(SkyRLError):
    """Raised by an environment or reward function: this sample cannot be judged. The message says why."""


class WeightSyncError(RunError):
    """The engine's weights are not the learner's."""


class ProcessError(RunError):
    """A process of the run could not be started, died, or gave no sign of life in time."""


class ProcessLost(ProcessError):
    """A rank or an engine died, or gave no sign of life in time."""

    def __init__(self, message: str, process: str = "") -> None:
        """`process` is the name of the process, such as `policy-1`."""
        self.process = process
        super().__init__(message)

    @property
    def role(self) -> str:
        """Role of the process in the run: policy, critic, ref or engine."""
        return self.process.rpartition("-")[0]


class EngineFailed(ProcessError):
    """One of several engines failed in a call that was not made through their client."""

    def __init__(self, number: int, cause: RunError) -> None:
        """`number` is the engine's in the run."""
        self.number, self.cause = number, cause
        super().__init__(str(cause))


class NoRoomError(ProcessError):
    """The cluster has too few machines or GPUs free for the run."""

    def __init__(self, message: str, pool: str = "") -> None:
        """`pool` is the first pool of the layout without a place, such as `policy+ref` or `engine-1`."""
        self.pool = pool
        super().__init__(message)


class WorkerEnded(ProcessError):
    """A sandboxed worker gave no answer, and none of its processes is left."""

    def __init__(self, how: Literal["exit", "timeout", "output"], message: str) -> None:
        self.how: Literal["exit", "timeout", "output"] = how
        super().__init__(message)


EXIT_REQUEUE = 75
"""Exit code for "run the same command again to continue": EX_TEMPFAIL of sysexits.h."""

EXIT_INTERRUPTED = 130
"""Exit code after Ctrl-C, by the convention of shells: 128 + SIGINT."""


class Stopped(BaseException):
    """A run that was asked to stop, by a signal or its deadline, has stopped. Only the command catches it."""

    def __init__(self, message: str, exit_code: int = EXIT_REQUEUE) -> None:
        self.exit_code = exit_code
        super().__init__(message)


ProblemPart = Literal["title", "path", "message", "location", "hint"]
ProblemLine = tuple[tuple[ProblemPart, str], ...]
"""A line about problems, in parts that a terminal may colour."""


def render(problems: Iterable[Problem], title: str) -> str:
    """A table of problems: path, message, place; the hint on a line of its own."""
    return "\n".join("".join(text for _, text in line).rstrip() for line in problem_table(problems, title))


def problem_table(problems: Iterable[Problem], title: str) -> list[ProblemLine]:
    """The lines of `render` in parts, which are padded."""
    rows = tuple(problems)
    if not rows:
        return [(("title", printable(title)),)]
    noun = "warning" if all(row.severity == "warning" for row in rows) else "problem"
    count = f"1 {noun}" if len(rows) == 1 else f"{len(rows)} {noun}s"
    columns = [_columns(row) for row in rows]
    path_width = min(max(len(path) for path, _ in columns), 60)
    message_width = min(
        max((len(row.message) for row, (_, location) in zip(rows, columns, strict=True) if location), default=0), 72
    )
    lines: list[ProblemLine] = [(("title", printable(f"{title} ({count}):")),)]
    for row, (path, location) in zip(rows, columns, strict=True):
        message = f"{printable(row.message):<{message_width}}  "
        lines.append(
            (("path", f"  {printable(path):<{path_width}}  "), ("message", message), ("location", printable(location)))
        )
        lines += [(("path", f"  {'':<{path_width}}  "), ("hint", printable(line))) for line in row.hint.splitlines()]
    return lines


def _columns(problem: Problem) -> tuple[str, str]:
    """Path and place; the place alone for a problem of a whole file, whose path it repeats."""
    of_file = problem.path and problem.location.startswith(problem.path)
    return (problem.location, "") if of_file else (problem.path, problem.location)


def printable(text: str) -> str:
    """The text without control characters: a name read from a file may contain some, which a terminal would obey."""
    return "".join(letter if letter.isprintable() or letter == "\n" else repr(letter)[1:-1] for letter in text)
