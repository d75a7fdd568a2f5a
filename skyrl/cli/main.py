"""The `skyrl` command. Heavy imports happen inside the commands that need them: `skyrl config check` imports no
torch.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import NoReturn, TextIO, cast

import click

from skyrl.cli.command_line.commands import Commands, examples
from skyrl.cli.command_line.json_output import print_usage_error
from skyrl.cli.command_line.messages import say_error
from skyrl.errors import EXIT_INTERRUPTED, SkyRLError, Stopped
from skyrl.installation import __version__, conflict
from skyrl.processes.linux import ANYWHERE, needs_linux
from skyrl.processes.redaction import RedactedStream
from skyrl.processes.signals import RESUMES_FROM_LAST_CHECKPOINT, handled_signals, stop_command

SECTIONS = {
    "Start": {
        "init": ("preparing.init:init", "Create a folder with a task that trains at once on a CPU."),
        "config": ("preparing.config:config", "Check, show, explain, compare or convert configurations."),
        "doctor": ("preparing.doctor:doctor", "Check in seconds whether a run would start here."),
        "data": ("preparing.data:data", "Inspect, show, make or split the data of a run."),
        "templates": ("preparing.templates:templates", "Check or show chat templates."),
        "plan": ("planning.plan:plan", "Estimate GPUs and memory, or propose a layout."),
        "simulate": ("planning.simulate:simulate", "Estimate throughput and age of samples, in virtual time."),
        "rehearse": ("planning.rehearse:rehearse", "Try every phase of a large run in miniature, here."),
        "completion": ("preparing.completion:completion", "Print the script that makes a shell complete words."),
    },
    "Train": {
        "run": ("training.run:run", "Train a model; the same command resumes."),
        "launch": ("training.launch:launch", "Train in the background, on Ray or as a Slurm job."),
        "sweep": ("training.sweep:sweep", "Train a run with several values, and compare."),
    },
    "Look at runs": {
        "watch": ("results.watch:watch", "Show the progress of a run from another terminal."),
        "view": ("results.view:view", "Browse the samples of a run in a browser."),
        "report": ("results.run_report:report", "Write curves and samples of runs to one HTML file."),
        "eval": ("results.evaluate:evaluate", "Evaluate a model, a run or a checkpoint."),
        "generate": ("results.evaluate:generate", "Write a model's answers to prompts."),
        "timeline": ("results.timeline:timeline", "Write what each process did in a step, for a trace viewer."),
    },
    "Operate": {
        "ckpt": ("results.checkpoints:ckpt", "List, verify, show or compare checkpoints."),
        "engines": ("training.engines:engines", "List, add or drain the engines of a running run."),
        "replay": ("results.replay:replay", "Compute recorded steps again, and compare every bit."),
        "bisect": ("results.replay:bisect", "Find the first step at which two runs diverge."),
        "track": ("results.track:track", "Deliver the metrics of a run to a tracker."),
    },
    "Convert": {
        "export": ("results.export:export", "Store a checkpoint's model as a Hugging Face folder."),
        "model": ("preparing.model:model", "Check a model, or convert one from GGUF."),
    },
    "Services": {
        "serve": ("serving.serve:serve", "Serve a model in OpenAI's and Anthropic's protocols."),
        "serve-training": ("serving.serve_training:serve_training", "Train models for Tinker clients."),
        "publish": ("serving.publish:publish", "Publish a server's address under a name."),
        "serve-code": ("serving.environment_services:serve_code", "Run programs of policies in sandboxes."),
        "serve-retriever": ("serving.environment_services:serve_retriever", "Answer searches over a corpus."),
        "serve-reward": ("serving.environment_services:serve_reward", "Score chats with a reward model."),
    },
}
"""Title of a section of `skyrl --help` -> name of a command -> where in `skyrl.cli` it is defined, and what it does.
Only the command that is used is imported.
"""


@click.group(
    cls=Commands,
    sections=SECTIONS,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=examples("skyrl init mine", "skyrl run run.toml trainer.epochs=2", "skyrl view runs/mine"),
)
@click.version_option(__version__, prog_name="skyrl")
@click.pass_context
def cli(context: click.Context) -> None:
    """Reinforcement-learning post-training of language models.

    A run is described by files (TOML, YAML, JSON) and PATH=VALUE arguments, such as trainer.epochs=2; what comes
    later wins.
    """
    if warning := conflict():
        click.echo(warning, err=True)
    if context.invoked_subcommand not in ANYWHERE:
        needs_linux(f"skyrl {context.invoked_subcommand}")


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
    if "_SKYRL_COMPLETE" in os.environ:
        from skyrl.cli.preparing.completion import register

        register()
    out, err = RedactedStream(sys.stdout), RedactedStream(sys.stderr)
    status: object = None
    with (
        contextlib.redirect_stdout(cast(TextIO, out)),
        contextlib.redirect_stderr(cast(TextIO, err)),
        _signals_end_it(is_process),
        _flushed((out, err)),
        _errors_as_exit_codes(words := sys.argv[1:] if arguments is None else list(arguments)),
    ):
        status = cli.main(args=list(words), prog_name="skyrl", standalone_mode=False)
    sys.exit(status if isinstance(status, int) else 0)  # some commands return their exit code


@contextlib.contextmanager
def _errors_as_exit_codes(words: Sequence[str]) -> Iterator[None]:
    """Turn errors into a message and the exit code of their kind; `words` are the arguments of the command."""
    try:
        yield
    except click.ClickException as error:
        if isinstance(error, click.UsageError) and "--json" in words:
            print_usage_error(error)
        error.show()
        sys.exit(2)
    except (Stopped, SkyRLError) as ending:
        with contextlib.suppress(OSError):
            say_error(ending)
        sys.exit(ending.exit_code)
    except (KeyboardInterrupt, click.Abort):
        _explain(f"Stopped. {RESUMES_FROM_LAST_CHECKPOINT}")
        sys.exit(EXIT_INTERRUPTED)
    except ModuleNotFoundError as error:
        from skyrl.cli.command_line.extras import missing_package

        hint = missing_package(error)
        _explain(hint or _traceback())
        sys.exit(2 if hint else 1)
    except BaseException as error:  # unless the machine is the cause, a defect: print the traceback, without secrets
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # of a library in Rust
            raise
        _explain(_known_cause(error) or _traceback())
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


def _known_cause(error: BaseException) -> str | None:
    """The message for a file that cannot be read or written, and for a limit of this machine on memory or threads; None
    for any other error.
    """
    text = str(error)
    if isinstance(error, OSError) and error.errno in _OF_FILES:
        if error.filename is not None:
            return f"{error.filename}: {error.strerror}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return error.strerror
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


def _explain(message: str) -> None:
    """Print the last message of the command; a full disk behind standard error does not change the exit code."""
    with contextlib.suppress(OSError):
        click.echo(message, err=True)
