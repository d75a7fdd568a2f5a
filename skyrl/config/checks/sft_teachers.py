"""Checks of the teacher of a supervised run."""

from __future__ import annotations

from collections.abc import Iterator

from skyrl.config.settings.strategies import reads
from skyrl.config.settings.supervised_root import SFTConfig
from skyrl.errors import Problem


def teacher_is_one(run: SFTConfig) -> Iterator[Problem]:
    """A row is taught by one teacher."""
    settings = run.distillation
    teachers = {
        "distillation.stored": settings.stored,
        "distillation.teacher_path": settings.teacher_path,
        "distillation.endpoint.url": settings.endpoint.url,
    }
    named = [path for path, value in teachers.items() if value]
    for path in named[1:]:
        yield Problem(path=path, message=f"there is also a teacher in {named[0]}", hint="leave one of them out")


def teacher_temperature(run: SFTConfig) -> Iterator[Problem]:
    """Rows and servers give log-probabilities of the likeliest tokens, at temperature 1."""
    settings = run.distillation
    teacher = "rows store" if settings.stored else "a served teacher reports" if settings.endpoint.url else ""
    if teacher and settings.temperature != 1:
        message = f"{teacher} log-probabilities at temperature 1"
        yield Problem(path="distillation.temperature", message=message, hint="set it to 1")
    if settings.endpoint.url and settings.top_k is None:
        yield Problem(
            path="distillation.top_k",
            message="a served teacher reports log-probabilities of its likeliest tokens, not of all",
            hint="set it to 20, or as many as the server's --max-logprobs allows",
        )


def tail_of_distribution(run: SFTConfig) -> Iterator[Problem]:
    """Other divergences over the chosen tokens alone are lowest where the model leaves those tokens."""
    settings = run.distillation
    if settings.has_teacher and not settings.compares_all and not settings.tail and settings.beta:
        yield Problem(
            path="distillation.tail",
            message=f"beta = {settings.beta:g} over the chosen tokens alone would move probability away from them",
            hint="set it to true, or distillation.beta = 0",
        )


def teacher_excludes_megatron(run: SFTConfig) -> Iterator[Problem]:
    """The divergence from a teacher's distributions is not computed by Megatron's pipelines yet."""
    if run.distillation.has_teacher and reads(run, "megatron_config"):
        message = "megatron does not compute the divergence from a teacher yet"
        yield Problem(path="strategy", message=message, hint="set it to fsdp2, or leave the teacher out")
