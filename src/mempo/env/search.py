"""Search as a tool."""

from __future__ import annotations

from collections.abc import Mapping

from mempo.core import Json, Observation, RetrievalError, Retriever, ToolError
from mempo.text.passages import render_passages


class SearchTool:
    """`search(query)`: the best passages of a retriever, as text.

    A failed search is an observation that says so: it never ends a trajectory. A blank query is
    never sent; it counts as invalid arguments.
    """

    name = "search"
    description = "Search an encyclopedia. Returns the passages that match the query best."
    parameters: Mapping[str, Json] = {
        "type": "object",
        "properties": {"query": {"type": "string", "description": "what to look for"}},
        "required": ["query"],
        "additionalProperties": False,
    }

    def __init__(self, retriever: Retriever, top_k: int = 3) -> None:
        self._retriever = retriever
        self._top_k = top_k

    async def call(self, arguments: Mapping[str, Json]) -> Observation:
        query = arguments.get("query")
        if not isinstance(query, str) or not query.strip() or set(arguments) != {"query"}:
            raise ToolError("search needs exactly one argument, 'query': a text that is not blank")
        try:
            [passages] = await self._retriever.search([query], self._top_k)
        except RetrievalError as error:
            return Observation("The search failed. Try again.", error=f"{type(error).__name__}: {error}")
        return Observation(render_passages(passages), tuple(passages))

    async def aclose(self) -> None:
        """Close the retriever's connections, where it has some."""
        if (close := getattr(self._retriever, "aclose", None)) is not None:
            await close()
