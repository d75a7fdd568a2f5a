r"""An HTTP retriever over one corpus, in the protocol of the environment `search` and of Search-R1 (arXiv:2503.09516).

A corpus is a JSONL file with one document a line, in the form of Search-R1, or with a separate title:

    {"id": "17", "contents": "Paris\nParis is the capital of France."}
    {"id": "17", "title": "Paris", "text": "Paris is the capital of France."}

Documents are ranked by BM25. The service answers:

    POST /retrieve  {"query": "..." or "queries": [...], "topk": 3, "return_scores": true}
         -> {"result": [[{"document": {"id": ..., "contents": ...}, "score": ...}, ...], ...]}    a list for each query
    GET  /health    -> {"documents": 1234}

Without `return_scores`, the lists contain the documents directly. An invalid request is answered with 400 and
`{"error": ...}`. Without a token, only this machine is served; with one, every request must carry it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, TypedDict

import bm25s
import numpy as np
from attrs import frozen
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from skyrl.errors import DataError, RequestError
from skyrl.processes.service_app import HangUp, ServiceThreads, json_object, post_route, service_app
from skyrl.tree.syntax_errors import json_line_error

_WORD = r"(?u)\w+"

MOST_QUERIES, MOST_DOCUMENTS, LONGEST_QUERY = 256, 100, 10_000

MOST_AT_ONCE = 8
"""Largest number of requests that are searched for at the same time; others wait."""


class Document(TypedDict):
    """A document of the corpus, in the form that the retriever sends."""

    id: str
    contents: str


@frozen(kw_only=True)
class Hit:
    """A document and its BM25 score, which is above 0: documents that share no word with the query are not hits."""

    document: Document
    score: float


class SearchIndex:
    """BM25 in the variant of Lucene (bm25s, arXiv:2407.03618) with k1 = 1.5, b = 0.75. Words are lower-cased, without
    stop words or stemming, so any language that separates words with spaces works. The index is held in memory.
    """

    def __init__(self, documents: Sequence[Document]) -> None:
        """Raises `DataError` if the documents contain no words."""
        self._documents = tuple(documents)
        words = _words([document["contents"] for document in documents])
        if not any(words):
            raise DataError("these documents contain no words, so nothing can be found in them")
        self._bm25 = bm25s.BM25()
        self._bm25.index(words, show_progress=False)

    def __len__(self) -> int:
        return len(self._documents)

    def search(self, query: str, topk: int) -> tuple[Hit, ...]:
        """At most `topk` documents, best first; equal scores keep the order of the corpus."""
        (words,) = _words([query])
        if not words:
            return ()
        scores = self._bm25.get_scores(words)
        matches = np.flatnonzero(scores > 0)
        best = matches[np.argsort(-scores[matches], kind="stable")[:topk]]
        return tuple(Hit(document=self._documents[index], score=float(scores[index])) for index in best)


def read_corpus(path: Path) -> tuple[Document, ...]:
    """Every document of a file. Raises `DataError` with file and line for the first invalid one."""
    if not path.is_file():
        raise DataError(f"there is no corpus {path}" if not path.exists() else f"the corpus {path} is not a file")
    documents: dict[str, Document] = {}
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    document = _document(line, f"{path}:{number}", default_id=str(number))
                    if document["id"] in documents:
                        raise DataError(f"{path}:{number}: another document has the id {document['id']!r}")
                    documents[document["id"]] = document
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not text in UTF-8: {error}") from error
    if not documents:
        raise DataError(f"{path} contains no documents")
    return tuple(documents.values())


def _document(line: str, where: str, default_id: str) -> Document:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: not JSON: {json_line_error(error)}") from error
    except RecursionError as error:
        raise DataError(f"{where}: not JSON: {error}") from error
    if not isinstance(row, Mapping):
        raise DataError(f"{where}: {line.strip():.80} is not an object with the text 'contents'")
    identity = row.get("id", default_id)
    if not isinstance(identity, str | int) or isinstance(identity, bool):
        raise DataError(f"{where}: the id {identity!r:.80} is neither text nor a whole number")
    return {"id": str(identity), "contents": _contents(row, where)}


def _contents(row: Mapping[str, Any], where: str) -> str:
    contents, title, text = row.get("contents"), row.get("title", ""), row.get("text")
    if isinstance(contents, str):
        return contents
    if contents is None and isinstance(title, str) and isinstance(text, str):
        return f"{title}\n{text}" if title else text
    raise DataError(f"{where}: needs the text 'contents', or 'title' and 'text'; it has {', '.join(row) or 'nothing'}")


def _words(texts: list[str]) -> list[list[str]]:
    result: list[list[str]] = bm25s.tokenize(
        texts, token_pattern=_WORD, stopwords=[], return_ids=False, show_progress=False
    )
    return result


def retriever_app(index: SearchIndex, token: str | None = None) -> Starlette:
    """The service, for any ASGI server. With a token, every request needs `Authorization: Bearer TOKEN`."""
    workers = ServiceThreads(MOST_AT_ONCE, "skyrl-retriever")

    async def retrieve(request: Request, body: bytes) -> JSONResponse:
        queries, topk, return_scores = question_of(json_object(body))

        def found(gone: HangUp) -> list[list[object]]:
            hits = [index.search(query, topk) for query in takewhile(lambda _: not gone.has_happened(), queries)]
            if not return_scores:
                return [[hit.document for hit in item] for item in hits]
            return [[{"document": hit.document, "score": hit.score} for hit in item] for item in hits]

        return JSONResponse({"result": await workers.run(found)})

    async def health(request: Request) -> JSONResponse:
        return JSONResponse({"documents": len(index)})

    return service_app([post_route("/retrieve", retrieve), Route("/health", health)], token=token)


def question_of(body: Mapping[str, object]) -> tuple[list[str], int, bool]:
    """Queries, number of documents, and whether scores are wanted, of one request. Raises `RequestError`."""
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
    return queries, topk, scores
