"""A retriever as Search-R1's scripts write one: one FastAPI endpoint, no batching. The benchmark's yardstick.

    python benchmarks/plain_server.py INDEX PORT

It opens the BM25 files of a mempo index with bm25s alone and keeps the corpus in memory.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import bm25s
import Stemmer
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

app = FastAPI()
state: dict[str, Any] = {}


class QueryRequest(BaseModel):
    queries: list[str]
    topk: int | None = None
    return_scores: bool = False


@app.post("/retrieve")
def retrieve(request: QueryRequest) -> dict[str, Any]:
    tokens = bm25s.tokenize(
        request.queries, stopwords="en", stemmer=state["stemmer"], return_ids=False, show_progress=False
    )
    rows, scores = state["bm25"].retrieve(tokens, k=request.topk or 3, show_progress=False)
    documents = [[state["corpus"][row] for row in query_rows] for query_rows in rows]
    if not request.return_scores:
        return {"result": documents}
    return {
        "result": [
            [{"document": document, "score": float(score)} for document, score in zip(found, found_scores, strict=True)]
            for found, found_scores in zip(documents, scores, strict=True)
        ]
    }


@app.get("/health")
def health() -> dict[str, str]:
    return {"status": "ok"}


def main() -> None:
    index, port = Path(sys.argv[1]), int(sys.argv[2])
    data = index / json.loads((index / "manifest.json").read_text(encoding="utf-8"))["data"]
    state["stemmer"] = Stemmer.Stemmer("english")
    state["bm25"] = bm25s.BM25.load(data / "bm25", mmap=True)
    with open(data / "passages.jsonl", encoding="utf-8") as file:
        rows = map(json.loads, file)
        state["corpus"] = [{"id": row["id"], "contents": f'"{row["title"]}"\n{row["text"]}'} for row in rows]
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning", access_log=False)


if __name__ == "__main__":
    main()
