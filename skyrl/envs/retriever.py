"""An HTTP retriever over one corpus, in the protocol of the environment `search` and of Search-R1.

    POST /retrieve  {"query": "..." or "queries": [...], "topk": 3, "return_scores": true}
         -> {"result": [[{"document": {"id": ..., "contents": ...}, "score": ...}, ...], ...]}    a list for each query
    GET  /health    -> {"documents": 1234}

Without `return_scores`, the lists contain the documents directly. An invalid request is answered with 400 and
`{"error": ...}`. Without a token, only this machine is served; with one, every request must carry it.
"""

from __future__ import annotations

import json
from typing import Any

from attrs import frozen
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from skyrl.envs.corpus import Hit, SearchIndex
from skyrl.processes.service import body_of, has_token

MOST_QUERIES, MOST_DOCUMENTS, LONGEST_QUERY = 256, 100, 10_000


@frozen(kw_only=True)
class Question:
    """One search request."""

    queries: tuple[str, ...]
    topk: int
    return_scores: bool

    @classmethod
    def of(cls, body: bytes) -> Question:
        """The search request in an HTTP body. Raises `ValueError` with a sentence for the client."""
        given = json.loads(body)
        if not isinstance(given, dict):
            raise ValueError("the body has to be a JSON object")
        queries = given.get("queries", given.get("query"))
        queries = [queries] if isinstance(queries, str) else queries
        if not isinstance(queries, list) or not all(isinstance(each, str) for each in queries):
            raise ValueError("'query' has to be a text, or 'queries' a list of texts")
        if len(queries) > MOST_QUERIES or any(len(each) > LONGEST_QUERY for each in queries):
            raise ValueError(f"at most {MOST_QUERIES} queries of {LONGEST_QUERY} characters")
        topk, scores = given.get("topk", 3), given.get("return_scores", False)
        if not isinstance(topk, int) or isinstance(topk, bool) or not 1 <= topk <= MOST_DOCUMENTS:
            raise ValueError(f"'topk' has to be a whole number from 1 to {MOST_DOCUMENTS}")
        if not isinstance(scores, bool):
            raise ValueError("'return_scores' has to be true or false")
        return cls(queries=tuple(queries), topk=topk, return_scores=scores)


def retriever_app(index: SearchIndex, token: str | None = None) -> Starlette:
    """The service, for any ASGI server. With a token, every request needs `Authorization: Bearer TOKEN`."""

    async def retrieve(request: Request) -> JSONResponse:
        if not has_token(token, request):
            return JSONResponse({"error": "this retriever requires its token: Authorization: Bearer ..."}, 401)
        try:
            question = Question.of(await body_of(request))
        except (ValueError, RecursionError) as error:
            return JSONResponse({"error": str(error)}, 400)
        return JSONResponse({"result": await run_in_threadpool(_answer, index, question)})

    async def health(request: Request) -> JSONResponse:
        return JSONResponse({"documents": len(index)})

    return Starlette(routes=[Route("/retrieve", retrieve, methods=["POST"]), Route("/health", health)])


def _answer(index: SearchIndex, question: Question) -> list[list[Any]]:
    def shown(hit: Hit) -> object:
        return {"document": hit.document, "score": hit.score} if question.return_scores else hit.document

    return [[shown(hit) for hit in index.search(query, question.topk)] for query in question.queries]
