"""Finds the command of a script that starts a run, by the programs that each system has, and says what was assumed.

A program decides what a run is, whatever its settings say: each system has a table of them. The command line option
`--command` chooses among several.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from attrs import evolve, frozen

from skyrl.errors import ConfigError, Problem
from skyrl.interop import not_converted
from skyrl.interop.report import Conversion, Line
from skyrl.interop.shell.scripts import Script, ScriptCommand, read_script
from skyrl.interop.shell.unknown import as_argument, is_known, shown

_LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
_MODULE = re.compile(r"[A-Za-z_][\w-]*(\.[A-Za-z_]\w*)*")
_SCRIPT = re.compile(r".*\.(?:sh|bash|sbatch|slurm)")
_OPTION_OF_PYTHON = re.compile(r"-[BEIOPRSsuvx]+|-[XW]")
_MOST_ROWS = 12


@frozen(kw_only=True)
class ProgramFacts:
    """A table's entry for a program."""

    refused: str = ""
    """Why its runs cannot be converted; empty if they can."""

    aside: str = ""
    """The purpose of a program that does not train, such as "a server"; a script may start one beside a run."""


RUNS = ProgramFacts()
"""A program whose settings are converted."""


def unconverted(reason: str) -> ProgramFacts:
    """A program that trains something that is not converted."""
    return ProgramFacts(refused=reason)


def aside(description: str) -> ProgramFacts:
    """A program that trains nothing."""
    return ProgramFacts(aside=description)


@frozen(kw_only=True)
class PeerPrograms:
    """How runs of one system are started."""

    name: str
    """The system, for messages."""

    programs: Mapping[str, ProgramFacts]
    """Suffix of a program's dotted name, or the name of a command -> what is known of it. The longest suffix counts."""

    is_setting: Callable[[str], bool]
    """Whether a word can only be a setting of this system: it marks a program that is not known."""

    commands: tuple[str, ...] = ()
    """Commands with subcommands, which are programs: `trl` of `trl grpo`."""

    wrappers: re.Pattern[str] = re.compile(r"(?!)")
    """Modules that start the program that follows them: `python -m areal.launcher.local train.py`."""


@frozen(kw_only=True)
class RunCommand:
    """The command of a script that starts a run."""

    program: str
    """Dotted name of the module or of the file, or the command with its subcommand."""

    known: ProgramFacts | None
    """None for a program that is not in the table."""

    words: tuple[str, ...]
    """The arguments of the program, with unknown parts marked."""

    before: tuple[str, ...] = ()
    """The words before the program: Python, or the launcher that starts several processes."""

    line: int
    is_certain: bool
    script: Script
    system: str
    unread: tuple[Line, ...] = ()
    """Words of the command that are no settings."""

    lost: tuple[Line, ...] = ()
    """Settings that the script passes to no program."""

    @property
    def texts(self) -> list[str]:
        """The arguments, with the source of unknown parts in its place."""
        return [as_argument(word) for word in self.words]

    def split(self, is_setting: Callable[[str], bool]) -> tuple[list[str], RunCommand]:
        """The words that are settings, and the launch with a line of the report for each other word."""
        settings = [as_argument(word) for word in self.words if is_setting(shown(word))]
        return settings, self.without([word for word in self.words if not is_setting(shown(word))])

    def without(self, words: Sequence[str]) -> RunCommand:
        """The launch with a line of the report for each word that is not read."""
        unknown = "only a shell can evaluate it: write its words out"
        lines = (
            Line(
                outcome="refused",
                source=shown(word) or "''",
                reason=f"line {self.line}: {'no setting, so it was not read' if is_known(word) else unknown}",
            )
            for word in words
        )
        return evolve(self, unread=(*self.unread, *lines))

    def option(self, *names: str) -> tuple[str, RunCommand]:
        """The value of an option, `--name value` or `--name=value`, and the launch without it; empty if not given."""
        for at, word in enumerate(self.words):
            name, equals, text = word.partition("=")
            if name not in names:
                continue
            end = at + 1 if equals else at + 2
            value = text if equals else "".join(self.words[at + 1 : end])
            return as_argument(value), evolve(self, words=self.words[:at] + self.words[end:])
        return "", self

    def finished(self, conversion: Conversion) -> Conversion:
        """The conversion of this command, which tells what was assumed and what was not read."""
        notice = ""
        if self.known is None:
            notice = (
                f"{self.program or 'The command'} (line {self.line}) is not a known program of {self.system}: the "
                "settings were converted as for its usual trainer; what this program's own code changes is not in the "
                "result."
            )
        return evolve(
            conversion,
            lines=(*conversion.lines, *self.unread, *self.lost),
            notice="\n".join(filter(None, (notice, conversion.notice))),
            remarks=(*conversion.remarks, *_remarks(self)),
        )


def launch_of(text: str, where: str, system: PeerPrograms, number: int | None) -> RunCommand:
    """The command of a script that starts a run; `number` chooses among several, from 1. Raises `ConfigError` if there
    is none, if there are several and none is chosen, and for a program that cannot be converted.
    """
    script = read_script(text, where)
    distinct: dict[tuple[str, tuple[str, ...]], RunCommand] = {}  # the first of those with the same program and words
    for command in script.commands:
        if launched := _launch(command, script, system):
            distinct.setdefault((launched.program, (*launched.before, "", *launched.words)), launched)
    launches = [*distinct.values()]
    runs = [launch for launch in launches if launch.known is None or not launch.known.aside]
    if not runs:
        raise _no_command(script, launches, where, system)
    if number is None and len(runs) > 1:
        choices = tuple(
            Problem(path=f"--command {at}", message=f"line {run.line}: {_briefly(run, runs)}")
            for at, run in enumerate(runs[:_MOST_ROWS], 1)
        )
        raise not_converted(where, f"starts {len(runs)} different runs: choose one with --command N", choices=choices)
    if number is not None and not 1 <= number <= len(runs):
        raise not_converted(
            where, f"starts {len(runs)} run{'s' if len(runs) > 1 else ''}, so there is no --command {number}"
        )
    launch = runs[(number or 1) - 1]
    if launch.known is not None and launch.known.refused:
        raise not_converted(where, f"line {launch.line} starts {launch.program}: {launch.known.refused}")
    return launch


def reads_images(model: str) -> bool:
    """Whether a model's name says that it reads images."""
    return re.search(r"(?i)[-_]vl\b|[-_]vl[-_]|vision|llava", model) is not None


def _launch(command: ScriptCommand, script: Script, system: PeerPrograms) -> RunCommand | None:
    words = command.texts
    start, program = _program(words, system)
    arguments = command.words[start:]
    names = [name for name in system.programs if f".{program}".endswith(f".{name}")]
    known = system.programs[max(names, key=len)] if names else None
    if system.is_setting(words[0]) or (
        known is None and (_SCRIPT.fullmatch(program) or not any(map(system.is_setting, map(shown, arguments))))
    ):
        return None
    return RunCommand(
        program=program,
        known=known,
        words=tuple(word for word in arguments if word != "--"),
        before=tuple(words[:start]),
        line=command.line,
        is_certain=command.is_certain,
        script=script,
        lost=tuple(
            Line(
                outcome="refused",
                source=item.texts[0].partition("=")[0],
                reason=f"line {item.line}: no backslash ends the line before it, so Bash passes it to no program",
            )
            for item in script.commands
            if system.is_setting(item.texts[0])  # which begins a command of its own
        ),
        system=system.name,
    )


def _program(words: Sequence[str], system: PeerPrograms) -> tuple[int, str]:
    """Position after the program's name, and the name: of a module or a file with dots, of a subcommand."""
    for at, (word, following) in enumerate(pairwise([*words, ""])):
        if system.wrappers.fullmatch(following) or system.wrappers.fullmatch(word):
            continue
        if word == "-m" and following and _MODULE.fullmatch(following) and following not in _LAUNCHERS:
            return at + 2, following
        if word.rpartition("/")[2] in system.commands and following and not following.startswith("-"):
            return at + 2, f"{word.rpartition('/')[2]} {following}"
        if word.endswith(".py"):
            return at + 1, re.sub(r"^[./]+", "", word.removesuffix(".py")).replace("/", ".")
        if _SCRIPT.fullmatch(word):
            return at + 1, word
    for at, word in enumerate(words):
        if re.fullmatch(r"(.*/)?python[\d.]*", word):
            start = at + 1
            while start < len(words) and _OPTION_OF_PYTHON.fullmatch(words[start]):
                start += 1
            name = words[start] if start < len(words) and "=" not in words[start] else ""
            return start + bool(name), name
    return 1, words[0]


def _briefly(launch: RunCommand, others: Sequence[RunCommand]) -> str:
    """The program and the words that not all of the others have."""
    summary = " ".join(
        [launch.program, *(shown(word) for word in launch.words if any(word not in other.words for other in others))]
    )
    return summary if len(summary) <= 100 else summary[:97] + "..."


def _no_command(script: Script, launches: Sequence[RunCommand], where: str, system: PeerPrograms) -> ConfigError:
    """Why a script has no command to convert."""
    if launches:
        first = launches[0]
        description = first.known.aside if first.known else ""
        return not_converted(where, f"line {first.line} starts {first.program}: {description}")
    started = [(command.line, word) for command in script.commands for word in command.texts if _SCRIPT.fullmatch(word)]
    started += list(script.sourced)
    named = "; ".join(dict.fromkeys(f"line {line} starts {word}" for line, word in started[:_MOST_ROWS]))
    message = f"starts no program that trains with {system.name}"
    if named:
        return not_converted(where, f"{message}: {named}", "convert that script")
    if script.ends:
        message += f": called without arguments, it ends in line {script.ends}"
        return not_converted(
            where, message, "write the command that it would start into a script of its own, and convert that"
        )
    names = dict.fromkeys(command.texts[0] for command in script.commands)
    hint = "it starts: " + ", ".join([*names][:_MOST_ROWS]) if names else "it starts no program at all"
    return not_converted(where, message, hint)


def _remarks(launch: RunCommand) -> list[str]:
    """Remarks on assumptions about the script."""
    script, remarks = launch.script, []
    if script.assumed:
        names = [f"{name} ({becomes})" if becomes else name for name, becomes in script.assumed]
        listed = ", ".join(names)
        remarks.append(
            f"Variables that the script takes from outside, assumed to be unset (and what follows): {listed}."
        )
    if script.undecided:
        rows = [f"line {line}: {text}" for line, text in script.undecided[:_MOST_ROWS]]
        rows += ["..."] if len(script.undecided) > _MOST_ROWS else []
        remarks.append(
            "Conditions that only running the script decides (what depends on them was refused):\n  "
            + "\n  ".join(rows)
        )
    if not launch.is_certain:
        remarks.append(f"Whether the script starts the command of line {launch.line} depends on these conditions.")
    if script.sourced:
        rows = [f"{name} (line {line})" for line, name in script.sourced]
        remarks.append("The script reads other scripts, whose variables are not known: " + ", ".join(rows) + ".")
    return remarks
