"""The `skyrl` command. Heavy imports happen inside the commands that need them: `skyrl config check` imports no
torch.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import functools
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import NoReturn, TextIO, cast

import click

from skyrl import __version__
from skyrl.cli.arguments import ARGUMENTS, STRICT, compose_arguments, refuse_nothing
from skyrl.cli.options import Commands
from skyrl.errors import EXIT_INTERRUPTED, SkyRLError, Stopped
from skyrl.installation import conflict
from skyrl.processes.redaction import RedactedStream
from skyrl.processes.signals import RESUMES_FROM_LAST_CHECKPOINT, handled_signals, stop_command

IMPORTED = {
    "bisect": "skyrl.cli.replay:bisect",
    "ckpt": "skyrl.cli.checkpoints:ckpt",
    "config": "skyrl.cli.config:config",
    "data": "skyrl.cli.data:data",
    "engines": "skyrl.cli.engines:engines",
    "eval": "skyrl.cli.evaluate:evaluate",
    "export": "skyrl.cli.export:export",
    "generate": "skyrl.cli.evaluate:generate",
    "init": "skyrl.cli.init:init",
    "launch": "skyrl.cli.launch:launch",
    "model": "skyrl.cli.model:model",
    "plan": "skyrl.cli.plan:plan",
    "publish": "skyrl.cli.publish:publish",
    "rehearse": "skyrl.cli.rehearse:rehearse",
    "replay": "skyrl.cli.replay:replay",
    "report": "skyrl.cli.run_report:report",
    "serve": "skyrl.cli.serve:serve",
    "serve-code": "skyrl.cli.serve_code:serve_code",
    "serve-retriever": "skyrl.cli.serve_retriever:serve_retriever",
    "serve-reward": "skyrl.cli.serve_reward:serve_reward",
    "simulate": "skyrl.cli.simulate:simulate",
    "sweep": "skyrl.cli.sweep:sweep",
    "templates": "skyrl.cli.templates:templates",
    "timeline": "skyrl.cli.timeline:timeline",
    "track": "skyrl.cli.track:track",
    "view": "skyrl.cli.view:view",
    "watch": "skyrl.cli.watch:watch",
}
"""Commands that are defined in other modules of this package: most uses of `skyrl` need one of them."""


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
@ARGUMENTS
@STRICT
def run(arguments: tuple[str, ...], strict: bool) -> None:
    """Train a model as configured."""
    refuse_nothing(arguments, "run")
    from skyrl.config.derive.run_kind import RunKind
    from skyrl.config.loading.kinds import kind_of
    from skyrl.config.settings.trackers import lacks_of
    from skyrl.processes.torch_environment import set_torch_environment

    composed = compose_arguments(arguments, strict=strict, also=RunKind.preflight_checks)
    set_torch_environment()
    with _log_slow_command("the import of torch and transformers"):
        from skyrl.experiments.experiment import experiment_class
    from skyrl.runs.recovery import attempts
    from skyrl.runs.session import RunSession
    from skyrl.runs.summary import summary

    if sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)
    kind = kind_of(composed.config)
    if any(origin.kind == "rule" for origin in composed.origins.get(kind.path("logger"), ())):
        why = next(lack for lack, _ in lacks_of("wandb", mode=composed.config.trainer.trackers.wandb.mode))
        click.echo(f"Metrics go to the console: {why} (the default of {kind.path('logger')} is wandb).", err=True)
    with _log_slow_command("the import of the modules that the run uses"):
        make = experiment_class(composed.config)
    for attempt in attempts(composed.config):
        experiment = make(attempt.run)
        experiment.is_another_try, experiment.places = attempt.is_another_try, composed.places
        with attempt:
            trained = RunSession(experiment).run()
    if not trained:
        click.echo(
            f"This run is already finished ({experiment.checkpoints.folder} has its last step): nothing was trained.\n"
            f"To train again, choose other folders ({kind.path('run_path')}, {kind.path('ckpt_path')}) or "
            f"delete these; to train longer, raise {' or '.join(kind.length)}."
        )
    for line in summary(experiment.cfg, experiment.folder):
        click.echo(line)


@cli.command()
@ARGUMENTS
@STRICT
@click.option(
    "--cluster", is_flag=True, help="Also check every machine of the Ray cluster at trainer.placement.ray_address."
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=1),
    default=60.0,
    show_default=True,
    help="With --cluster: seconds to wait for a machine.",
)
def doctor(arguments: tuple[str, ...], strict: bool, cluster: bool, timeout: float) -> None:
    """Check in seconds whether a run would start here: packages, GPUs, keys, models, folders, disks, locks.

    Every row of each file is read; the first one is rendered by the chat template and scored: a reward function is
    called twice, on an empty answer and on the ground truth. Nothing is started or written. With --cluster, every
    machine of a running Ray cluster is checked, too: versions, shared folders, clocks, memory, GPUs, and the network
    between each two. Exit code 1: something on the cluster has to be fixed.
    """
    from skyrl.cli.report import doctor_report
    from skyrl.config.derive.run_kind import RunKind

    run = compose_arguments(arguments, strict=strict, also=RunKind.doctor_checks).config
    for line in doctor_report(run):
        click.echo(line)
    if cluster:
        from skyrl.cli.doctor_cluster import examine

        sys.exit(1 if examine(run, timeout) else 0)


@cli.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a script that makes the shell complete commands, files and dotted paths.

    In ~/.bashrc: eval "$(skyrl completion bash)"
    """
    from skyrl.cli.completion import script

    click.echo(script(cli, shell))


@contextlib.contextmanager
def _log_slow_command(what: str) -> Iterator[None]:
    """Context for a wait before the run starts: progress is shown if it takes long."""
    from skyrl.processes.progress import Progress
    from skyrl.processes.wait_reporter import WaitReporter

    progress = Progress()
    with WaitReporter(progress, functools.partial(click.echo, err=True)), progress.waiting_for(what):
        yield


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
        from skyrl.cli.extras import missing_package

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
