r"""Documents that a policy may search, ranked by BM25.

A corpus is a JSONL file with one document a line, in the form of Search-R1 (arXiv:2503.09516), or with a separate
title:

    {"id": "17", "contents": "Paris\nParis is the capital of France."}
    {"id": "17", "title": "Paris", "text": "Paris is the capital of France."}
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import bm25s
import numpy as np
from attrs import frozen

from skyrl.errors import DataError
from skyrl.tree.syntax_errors import json_line_error

_WORD = r"(?u)\w+"


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
