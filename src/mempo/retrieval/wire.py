"""The wire format of a retriever, shared by its client and its servers (Search-R1's format).

    POST /retrieve  {"queries": [str], "topk": int | null, "return_scores": bool}
    with scores     {"result": [[{"document": {"id": str, "contents": str}, "score": float}]]}
    without         {"result": [[{"id": str, "contents": str}]]}
    GET  /health    {"service", "name", "corpus_hash", "passages", "index", "version"}

Standard library only, so that the client needs no server package; the models from which the
servers' OpenAPI pages are made are in `mempo.retrieval.models`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from mempo.core import Json, Passage

SERVICE = "mempo-retriever"
"""What `/health` of every mempo retriever says under `service`; a stranger on the port does not."""


@dataclass(frozen=True, slots=True)
class Health:
    """Who a retriever is, as `GET /health` says it."""

    name: str
    """The role that its owner gave it: `train`, `eval`, ..."""
    corpus_hash: str
    passages: int
    index: str
    """Kind of the index: `bm25`, `dense`, `hybrid`, `web`, ..."""
    version: str
    """Release of mempo that serves."""
    service: str = SERVICE


def render_contents(title: str, text: str) -> str:
    r"""One string of title and text, as corpora of this field write them.

    >>> render_contents("Paris", "Capital of France.")
    '"Paris"\nCapital of France.'
    >>> render_contents("", "one line")
    'one line'
    """
    return text if not title and "\n" not in text else f'"{title}"\n{text}'


def split_contents(contents: str) -> tuple[str, str]:
    r"""Title and text of a `contents` string: the first line is the title, its outer quotes are dropped.

    A single line is all text. Inverse of `render_contents` for titles without a line break.

    >>> split_contents('"Paris"\nCapital of France.')
    ('Paris', 'Capital of France.')
    >>> split_contents("one line")
    ('', 'one line')
    """
    title, line_break, text = contents.partition("\n")
    if not line_break:
        return "", contents
    quoted = len(title) >= 2 and title[0] == title[-1] == '"'
    return (title[1:-1] if quoted else title), text


def replace_surrogates(text: str) -> str:
    """The text with U+FFFD for each half of a surrogate pair, which UTF-8 cannot hold and tokenizers refuse.

    >>> replace_surrogates("a\\ud800b") == "a\\ufffdb"
    True
    """
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def render_request(queries: Sequence[str], top_k: int | None) -> dict[str, Json]:
    """The body of `POST /retrieve`, asking for scores."""
    return {"queries": [replace_surrogates(query) for query in queries], "topk": top_k, "return_scores": True}


def render_response(results: Sequence[Sequence[Passage]], *, scores: bool) -> dict[str, Json]:
    """The body that answers `POST /retrieve`, one list of passages a query.

    >>> render_response([[Passage("7", "T", "body", 1.5)]], scores=True)
    {'result': [[{'document': {'id': '7', 'contents': '"T"\\nbody'}, 'score': 1.5}]]}
    >>> render_response([[Passage("7", "T", "body", 1.5)], []], scores=False)
    {'result': [[{'id': '7', 'contents': '"T"\\nbody'}], []]}
    """
    return {"result": [[_render_hit(passage, scores=scores) for passage in passages] for passages in results]}


def parse_response(body: Json, queries: int) -> list[list[Passage]]:
    """The passages of each query, from either shape of the answer.

    Raises ValueError, saying where, for anything else: not an object, another number of lists than
    `queries`, a hit without its texts, a score that is not a finite number.

    >>> parse_response({"result": [[{"id": "7", "contents": "one line"}]]}, queries=1)
    [[Passage(id='7', title='', text='one line', score=None)]]
    """
    result = body.get("result") if isinstance(body, Mapping) else None
    if not isinstance(result, list):
        raise ValueError("the answer has no list under 'result'")
    if len(result) != queries:
        raise ValueError(f"{queries} queries were sent and {len(result)} results came back")
    return [_parse_hits(hits, f"result[{index}]") for index, hits in enumerate(result)]


def render_health(health: Health) -> dict[str, Json]:
    """The body of `GET /health`."""
    return asdict(health)


def parse_health(body: Json) -> Health:
    """Raises ValueError where the body is not a mempo retriever's."""
    if not isinstance(body, Mapping) or body.get("service") != SERVICE:
        raise ValueError(f'its /health does not say "service": "{SERVICE}"')
    try:
        return Health(
            name=str(body["name"]),
            corpus_hash=str(body["corpus_hash"]),
            passages=int(body["passages"]),
            index=str(body["index"]),
            version=str(body["version"]),
        )
    except (KeyError, TypeError, OverflowError) as error:  # int() of an infinite number overflows
        raise ValueError(f"its /health lacks {error}") from error


def _render_hit(passage: Passage, *, scores: bool) -> dict[str, Json]:
    document = {"id": passage.id, "contents": render_contents(passage.title, passage.text)}
    return {"document": document, "score": passage.score} if scores else document


def _parse_hits(hits: Json, place: str) -> list[Passage]:
    if not isinstance(hits, list):
        raise ValueError(f"{place} is not a list")
    return [_parse_hit(hit, f"{place}[{index}]") for index, hit in enumerate(hits)]


def _parse_hit(hit: Json, place: str) -> Passage:
    if not isinstance(hit, Mapping):
        raise ValueError(f"{place} is not an object")
    document, score = (hit["document"], hit.get("score")) if "document" in hit else (hit, None)
    if not isinstance(document, Mapping) or not isinstance(document.get("contents"), str):
        raise ValueError(f"{place} has no text under 'contents'")
    title, text = split_contents(replace_surrogates(document["contents"]))
    return Passage(replace_surrogates(str(document.get("id", ""))), title, text, _parse_score(score, place))


def _parse_score(score: Json, place: str) -> float | None:
    if score is None:
        return None
    if isinstance(score, bool) or not isinstance(score, int | float) or not abs(score) <= sys.float_info.max:
        raise ValueError(f"{place} has a score that is not a finite number: {score!r:.40}")
    return float(score)
