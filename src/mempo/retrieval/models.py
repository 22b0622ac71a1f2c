"""The servers' answers as pydantic models, from which their OpenAPI pages are made."""

from __future__ import annotations

from pydantic import BaseModel, Field

from mempo.retrieval.wire import SERVICE


class Document(BaseModel):
    """A passage without its score."""

    id: str
    contents: str = Field(description='`"Title"`, a line break, the text.')


class ScoredDocument(BaseModel):
    """A passage and its score, larger is better."""

    document: Document
    score: float | None


class RetrieveResponse(BaseModel):
    """Answer of `POST /retrieve`: one list a query, best first."""

    result: list[list[ScoredDocument]] | list[list[Document]]


class HealthResponse(BaseModel):
    """Answer of `GET /health`."""

    service: str = SERVICE
    name: str
    corpus_hash: str
    passages: int
    index: str
    version: str


class PageResponse(BaseModel):
    """Answer of `POST /fetch`."""

    url: str = Field(description="Where the page was found, after redirects.")
    title: str
    text: str
    truncated: bool = Field(description="Whether the text was cut to the server's limit.")
