"""Question answering with a search tool.

    <search>query</search>   -> <information> of the best documents, and another turn
    <answer>...</answer>     -> the reward: 1 if it is a right answer after normalisation, else 0

Protocol and reward rule of SkyRL-Gym's search (Search-R1, arXiv:2503.09516).
"""

from __future__ import annotations

import re
import string
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from attrs import frozen

from skyrl.config.settings.environment import SearchEnvConfig
from skyrl.envs.env import Env, EnvStep
from skyrl.envs.http_json import PATIENCE, ServiceReply, post
from skyrl.envs.rows import first_between, ground_truth, last_between, max_turns, tokenizable
from skyrl.processes.answers import BadAnswer, read

LONGEST_QUERY, SHOWN_CHARACTERS = 2000, 8000
TOKEN_VARIABLE = "SKYRL_RETRIEVER_TOKEN"
"""Environment variable with the token of a retriever, for its server and its clients."""

Retrieve = Callable[[str], ServiceReply[str]]
"""Finds documents for a query, as text: `ask_retriever` of a service."""

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


@frozen
class _Document:
    contents: str


@frozen
class _Hit:
    document: _Document


@frozen
class _SearchResults:
    result: tuple[tuple[_Hit, ...], ...]


class SearchEnv(Env):
    """`reward_spec.ground_truth` is `{"target": answer}` or `{"target": [answers]}`, or a text."""

    def __init__(self, extras: Mapping[str, Any], retrieve: Retrieve) -> None:
        super().__init__(extras)
        self._targets = targets(ground_truth(extras, "search", (str, dict)))
        self._retrieve = retrieve
        self._max_turns = max_turns(extras, default=2)
        self._turns = 0
        self._said = ""
        self._counts = {"searches": 0.0, "retries": 0.0}

    def step(self, action: str) -> EnvStep:
        self._turns += 1
        self._said += action
        if ("<answer>" in action and "</answer>" in action) or self._turns >= self._max_turns:
            answer = last_between(self._said, "<answer>", "</answer>")
            normalized_answer = None if answer is None else normalized(answer)
            return EnvStep(reward=score(self._said, self._targets), done=True, answer=normalized_answer)
        query = first_between(action, "<search>", "</search>")
        results = "Write a query between <search> and </search>."
        if query is not None:
            reply = self._retrieve(query)
            self._counts["searches"] += 1
            self._counts["retries"] += reply.retries
            results = reply.value
        observation = f"\n<information>{results}</information>\n"
        return EnvStep(reward=0.0, done=False, observations=({"role": "user", "content": observation},))

    def get_metrics(self) -> dict[str, float]:
        return {**self._counts, "turns": float(self._turns)}


def ask_retriever(
    settings: SearchEnvConfig, token: str | None, query: str, patience: float = PATIENCE
) -> ServiceReply[str]:
    """Documents that the retriever finds, as text. `token` is the token that it requires, if any; `patience` is in
    seconds. Raises as `post`.
    """
    body = {"query": query[:LONGEST_QUERY], "topk": settings.topk, "return_scores": True}
    answer = post(
        settings.search_url,
        body,
        documents,
        setting="environment.skyrl_gym.search.search_url",
        seconds=settings.timeout,
        patience=patience,
        token=token,
    )
    if settings.log_requests:
        print(f"search {query[:200]!r}: {answer.value[:200]!r}", file=sys.stderr)
    return answer


def targets(truth: str | Mapping[str, Any] | Iterable[object]) -> tuple[str, ...]:
    """The accepted answers of a row."""
    result = truth.get("target", ()) if isinstance(truth, Mapping) else truth
    return (result,) if isinstance(result, str) else tuple(str(item) for item in result)


def score(conversation: str, right: Sequence[str]) -> float:
    """1.0 if the last `<answer>` of a conversation matches one of the right answers exactly after normalisation, else
    0.0.
    """
    answer = last_between(conversation, "<answer>", "</answer>")
    return float(answer is not None and normalized(answer) in {normalized(item) for item in right})


def normalized(text: str) -> str:
    """Lower case without articles, punctuation and repeated space (the normalisation of SQuAD, arXiv:1606.05250)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def documents(answer: object) -> str:
    """Documents of a retriever's reply, `{"result": [[{"document": {"contents": ...}, "score": ...}, ...]]}`, as text.

    Raises `BadAnswer` for a malformed reply.
    """
    results = read(answer, _SearchResults).result
    if len(results) != 1:
        raise BadAnswer(f"with {len(results)} results for one query")
    texts = [tokenizable(item.document.contents) for item in results[0]]
    numbered = [f"Doc {number}: {text}" for number, text in enumerate(texts, start=1)]
    return "\n".join(numbered)[:SHOWN_CHARACTERS] or "No document was found."
