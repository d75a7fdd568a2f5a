"""An HTTP retriever over one corpus, in the protocol of the environment `search` and of Search-R1.

    POST /retrieve  {"query": "..." or "queries": [...], "topk": 3, "return_scores": true}
         -> {"result": [[{"document": {"id": ..., "contents": ...}, "score": ...}, ...], ...]}    a list for each query
    GET  /health    -> {"documents": 1234}

Without `return_scores`, the lists contain the documents directly. An invalid request is answered with 400 and
`{"error": ...}`. Without a token, only this machine is served; with one, every request must carry it.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from typing import Any

from attrs import frozen
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from skyrl.envs.services.corpus import Hit, SearchIndex
from skyrl.errors import RequestError
from skyrl.processes.service_app import HangUp, ServiceThreads, json_object, post_route, service_app

MOST_QUERIES, MOST_DOCUMENTS, LONGEST_QUERY = 256, 100, 10_000

MOST_AT_ONCE = 8
"""Largest number of requests that are searched for at the same time; others wait."""


@frozen(kw_only=True)
class Question:
    """One search request."""

    queries: tuple[str, ...]
    topk: int
    return_scores: bool

    @classmethod
    def of(cls, body: Mapping[str, object]) -> Question:
        """The search request in the object of an HTTP body. Raises `RequestError`."""
        queries = body.get("queries", body.get("query"))
        queries = [queries] if isinstance(queries, str) else queries
        if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
            raise RequestError("'query' has to be a text, or 'queries' a list of texts")
        if len(queries) > MOST_QUERIES or any(len(query) > LONGEST_QUERY for query in queries):
            raise RequestError(f"at most {MOST_QUERIES} queries of {LONGEST_QUERY} characters")
        topk, scores = body.get("topk", 3), body.get("return_scores", False)
        if not isinstance(topk, int) or isinstance(topk, bool) or not 1 <= topk <= MOST_DOCUMENTS:
            raise RequestError(f"'topk' has to be a whole number from 1 to {MOST_DOCUMENTS}")
        if not isinstance(scores, bool):
            raise RequestError("'return_scores' has to be true or false")
        return cls(queries=tuple(queries), topk=topk, return_scores=scores)


def retriever_app(index: SearchIndex, token: str | None = None) -> Starlette:
    """The service, for any ASGI server. With a token, every request needs `Authorization: Bearer TOKEN`."""
    workers = ServiceThreads(MOST_AT_ONCE, "skyrl-retriever")

    async def retrieve(request: Request, body: bytes) -> JSONResponse:
        question = Question.of(json_object(body))
        return JSONResponse({"result": await workers.run(lambda gone: _answer(index, question, gone))})

    async def health(request: Request) -> JSONResponse:
        return JSONResponse({"documents": len(index)})

    return service_app([post_route("/retrieve", retrieve), Route("/health", health)], token=token)


def _answer(index: SearchIndex, question: Question, gone: HangUp) -> list[list[Any]]:
    def shown(hit: Hit) -> object:
        return {"document": hit.document, "score": hit.score} if question.return_scores else hit.document

    queries = takewhile(lambda _: not gone.has_happened(), question.queries)
    return [[shown(hit) for hit in index.search(query, question.topk)] for query in queries]
