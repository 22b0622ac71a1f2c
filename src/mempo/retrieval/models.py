"""The wire format as pydantic models: what the servers validate and show in their OpenAPI pages."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from mempo.retrieval.wire import SERVICE


class RetrieveRequest(BaseModel):
    """Body of `POST /retrieve`. Unknown keys are ignored, as Search-R1's server does."""

    model_config = ConfigDict(strict=True)

    queries: list[str] = Field(description="Searches, answered in order; a blank one gets an empty list.")
    topk: int | None = Field(None, ge=1, description="Passages a query; null or absent: the server's default.")
    return_scores: bool = Field(False, description="Wrap each document and add its score.")


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
