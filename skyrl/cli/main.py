"""The `skyrl` command. Heavy imports happen inside the commands that need them: `skyrl config check` imports no
torch.
"""

from __future__ import annotations

import contextlib
import errno
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import NoReturn, TextIO, cast

import click

from skyrl.cli.command_line.commands import Commands
from skyrl.errors import EXIT_INTERRUPTED, SkyRLError, Stopped
from skyrl.installation import __version__, conflict
from skyrl.processes.redaction import RedactedStream
from skyrl.processes.signals import RESUMES_FROM_LAST_CHECKPOINT, handled_signals, stop_command

IMPORTED = {
    "bisect": "skyrl.cli.results.replay:bisect",
    "ckpt": "skyrl.cli.results.checkpoints:ckpt",
    "config": "skyrl.cli.preparing.config:config",
    "data": "skyrl.cli.preparing.data:data",
    "doctor": "skyrl.cli.preparing.doctor:doctor",
    "engines": "skyrl.cli.training.engines:engines",
    "eval": "skyrl.cli.results.evaluate:evaluate",
    "export": "skyrl.cli.results.export:export",
    "generate": "skyrl.cli.results.evaluate:generate",
    "init": "skyrl.cli.preparing.init:init",
    "launch": "skyrl.cli.training.launch:launch",
    "model": "skyrl.cli.preparing.model:model",
    "plan": "skyrl.cli.planning.plan:plan",
    "publish": "skyrl.cli.serving.publish:publish",
    "rehearse": "skyrl.cli.planning.rehearse:rehearse",
    "replay": "skyrl.cli.results.replay:replay",
    "report": "skyrl.cli.results.run_report:report",
    "run": "skyrl.cli.training.run:run",
    "serve": "skyrl.cli.serving.serve:serve",
    "serve-code": "skyrl.cli.serving.environment_services:serve_code",
    "serve-retriever": "skyrl.cli.serving.environment_services:serve_retriever",
    "serve-reward": "skyrl.cli.serving.environment_services:serve_reward",
    "simulate": "skyrl.cli.planning.simulate:simulate",
    "sweep": "skyrl.cli.training.sweep:sweep",
    "templates": "skyrl.cli.preparing.templates:templates",
    "timeline": "skyrl.cli.results.timeline:timeline",
    "track": "skyrl.cli.results.track:track",
    "view": "skyrl.cli.results.view:view",
    "watch": "skyrl.cli.results.watch:watch",
}
"""Name of a command -> where it is defined: most uses of `skyrl` need one of them."""


@click.group(cls=Commands, imported=IMPORTED, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="skyrl")
def cli() -> None:
    """Reinforcement-learning post-training of language models.

    A run is described by files (TOML, YAML, JSON) and PATH=VALUE arguments, such as trainer.epochs=2; what comes
    later wins.
    """
    if warning := conflict():
        click.echo(warning, err=True)


@cli.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a script that makes the shell complete commands, files and dotted paths.

    In ~/.bashrc: eval "$(skyrl completion bash)"
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None  # click knows each of the shells that may be chosen
    script = kind(cli, {}, "skyrl", "_SKYRL_COMPLETE").source()
    click.echo(script.replace(*_WITHOUT_SPACE[shell]) if shell in _WITHOUT_SPACE else script)


_WITHOUT_SPACE = {
    "bash": (
        "COMPREPLY+=($value)",
        "COMPREPLY+=($value)\n            [[ $value == *[.=] ]] && compopt -o nospace",
    ),
    "zsh": ("compadd -U -V", "compadd -S '' -U -V"),
}
"""Shell -> text of click's script, and its replacement that adds no space after `trainer.` and `trainer.epochs=`. Fish
needs none.
"""


@contextlib.contextmanager
def _signals_end_it(is_process: bool) -> Iterator[None]:
    """Within the context, a signal ends the command with a sentence. What comes after it does not change the exit code:
    if the command `is_process`, signals are ignored from here to the end of the interpreter, which takes a while.

    No effect in threads other than the main one, which handles signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, stop_command) for number in handled_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if is_process else handler)


@contextlib.contextmanager
def _flushed(streams: Sequence[RedactedStream]) -> Iterator[None]:
    """Flush the output; data still buffered at the end that cannot be written does not change the exit code of the
    command.
    """
    try:
        yield
    finally:
        for stream in streams:
            try:
                stream.flush()
            except OSError:
                stream.discard()


def main(arguments: Sequence[str] | None = None, *, is_process: bool = False) -> NoReturn:
    """Run the command; `is_process` if the process ends with it.

    Exit codes: 2 with a message for a user error, 1 for a failed run, 130 for Ctrl-C, and 75 for a run stopped by
    SIGTERM, SIGHUP or its deadline.
    """
    out, err = RedactedStream(sys.stdout), RedactedStream(sys.stderr)
    status: object = None
    with (
        contextlib.redirect_stdout(cast(TextIO, out)),
        contextlib.redirect_stderr(cast(TextIO, err)),
        _signals_end_it(is_process),
        _flushed((out, err)),
        _errors_as_exit_codes(),
    ):
        status = cli.main(
            args=arguments if arguments is None else list(arguments), prog_name="skyrl", standalone_mode=False
        )
    sys.exit(status if isinstance(status, int) else 0)  # some commands return their exit code


@contextlib.contextmanager
def _errors_as_exit_codes() -> Iterator[None]:
    """Turn errors into a message and the exit code of their kind."""
    try:
        yield
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except (Stopped, SkyRLError) as ending:
        _explain(str(ending))
        sys.exit(ending.exit_code)
    except (KeyboardInterrupt, click.Abort):
        _explain(f"Stopped. {RESUMES_FROM_LAST_CHECKPOINT}")
        sys.exit(EXIT_INTERRUPTED)
    except ModuleNotFoundError as error:
        from skyrl.cli.command_line.extras import missing_package

        hint = missing_package(error)
        _explain(hint or _traceback())
        sys.exit(2 if hint else 1)
    except OSError as error:
        _explain(_of_a_file(error) or _of_a_limit(error) or _traceback())
        sys.exit(1)
    except BaseException as error:  # a defect of skyrl: print the full traceback, without secrets
        if not isinstance(error, Exception) and type(error).__name__ != _PANIC:
            raise
        _explain(_of_a_limit(error) or _traceback())
        sys.exit(1)


_OF_FILES = frozenset(
    {
        errno.EACCES, errno.EDQUOT, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOSPC, errno.ENOTDIR,
        errno.EPERM, errno.EROFS,
    }
)  # fmt: skip
"""Errors of the operating system whose cause is outside the program: permissions, full disks, names, files in the
way.
"""


def _of_a_file(error: OSError) -> str | None:
    """The message for a file that cannot be read or written; None for any other error."""
    if error.errno not in _OF_FILES:
        return None
    if error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return error.strerror if error.errno in (errno.ENOSPC, errno.EDQUOT) else None


_PANIC = "PanicException"
"""Name of the class of errors that libraries in Rust raise, which is no `Exception`."""


def _of_a_limit(error: BaseException) -> str | None:
    """The message for a limit of this machine on memory or threads; None for any other error."""
    text = str(error)
    if isinstance(error, MemoryError) or "DefaultCPUAllocator: can't allocate memory" in text:
        return f"This process gets no more memory: raise its limit ({_MEMORY})."
    if "can't start new thread" in text or "Resource temporarily unavailable" in text:
        return f"This process gets no more threads: raise its limits (ulimit -u; for the memory of stacks {_MEMORY})."
    return None


_MEMORY = "ulimit -v, or that of its container or job"


def _traceback() -> str:
    """The traceback of the exception that is being handled."""
    import traceback

    return traceback.format_exc()


def _explain(why: str) -> None:
    """Print the last message of the command; a full disk behind standard error does not change the exit code."""
    with contextlib.suppress(OSError):
        click.echo(why, err=True)
