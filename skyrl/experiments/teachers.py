"""Teachers behind servers: of a policy, and of a supervised run."""

from __future__ import annotations

import os
from collections.abc import Collection

from skyrl.chats.tokenizer import ChatTokenizer
from skyrl.config.settings.distillation import TeacherServerConfig
from skyrl.inference.servers.scoring_server import TOKEN_VARIABLE, ScoringServer
from skyrl.runs.inputs import compare_served_tokens
from skyrl.training.teacher import ServedTeacher


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
