"""Teachers behind servers, and the teacher of a supervised run: a model beside it, a server, or what its rows store."""

from __future__ import annotations

import os
from collections.abc import Collection

from skyrl.batch import TEACHER_HIDDEN, TEACHER_IDS, TEACHER_LOGPROBS, TrainingBatch
from skyrl.chats.tokenizer import ChatTokenizer
from skyrl.config import ModelConfig, SFTConfig, TeacherConfig
from skyrl.config.settings.distillation import TeacherServerConfig
from skyrl.inference.servers.scoring_server import TOKEN_VARIABLE, ScoringServer
from skyrl.learners.workers.group import ScorerGroup
from skyrl.learners.workers.roles import SFTTeacherWorker
from skyrl.models.files.loading import load_tokenizer
from skyrl.runs.input_digests import adapter_digests, model_digests
from skyrl.runs.inputs import compare_served_tokens, refuse_other_tokens
from skyrl.training.teachers_by_source import ServedTeacher


async def with_teacher(
    batch: TrainingBatch, run: SFTConfig, teacher: ScorerGroup[SFTTeacherWorker] | ServedTeacher
) -> TrainingBatch:
    """The batch, whose rows carry what the model learns from the teacher: its hidden states at the learned tokens, or
    its likeliest tokens there.
    """
    settings = run.distillation
    if settings.top_k is None:
        assert isinstance(teacher, ScorerGroup)
        return batch.carrying(**{TEACHER_HIDDEN: await teacher.hidden(batch)})
    ids, logprobs = await teacher.token_logprobs(batch, settings.top_k, settings.temperature)
    return batch.carrying(**{TEACHER_IDS: ids, TEACHER_LOGPROBS: logprobs})


def served_teacher(endpoint: TeacherServerConfig, url: str) -> ServedTeacher:
    """The teacher behind the server at `url`, not connected yet."""
    token = os.environ.get(TOKEN_VARIABLE)
    limit, most = endpoint.timeout, endpoint.max_requests
    return ServedTeacher(ScoringServer(url, protocol=endpoint.protocol, token=token, timeout=limit, most=most))


async def connect(
    teachers: Collection[ServedTeacher],
    tokenizer: ChatTokenizer,
    policy: str,
    *,
    longest: int,
    top: int,
    address: str,
    length: str,
) -> None:
    """Ask each server for its limits, and compare its tokens with those of `policy`. Messages name the fields of
    their `address` and of the largest `length` of a row.

    Raises `UserError`, `ModelError` or `ProcessError` if one does not answer, takes fewer than `longest` tokens,
    reports fewer than `top` log-probabilities, or has other tokens.
    """
    try:
        for teacher in teachers:
            model = await teacher.server.connect(longest=longest, top=top, address=address, length=length)
            compare_served_tokens(tokenizer, model.path, teacher.server.url, policy)
    except BaseException:
        await close(teachers)  # a run that does not begin is not closed
        raise


async def close(teachers: Collection[ServedTeacher]) -> None:
    """Close the connections to the servers."""
    for teacher in teachers:
        await teacher.server.close()


def local_digests(teacher: TeacherConfig, *, moves: bool) -> dict[str, str]:
    """Digests of the files of the teachers in the run. If that of `model.path` moves, a checkpoint has its weights."""
    result = dict[str, str]()
    if teacher.model.path:
        result |= model_digests("trainer.teacher.model.path", teacher.model, weights=not moves)
        result |= adapter_digests("trainer.teacher.model.lora.path", teacher.model)
    for source, path in teacher.sources.items():
        result |= model_digests(f"trainer.teacher.sources.{source}", ModelConfig(path=path), weights=True)
    return result


def refuse_other_teacher(run: SFTConfig, tokenizer: ChatTokenizer) -> None:
    """Raises `ModelError` if the model beside the run's numbers tokens in another way."""
    teacher = run.distillation.teacher_path
    if teacher is not None:
        refuse_other_tokens(tokenizer, load_tokenizer(teacher), policy=str(run.model.path), teacher=teacher)
