"""A retriever of one's own: any object with an async `search` of several queries at once."""

from collections.abc import Sequence

from mempo import Agent
from mempo.core import Passage
from mempo.env import SearchTool
from mempo.policy.scripted import ScriptedPolicy

NOTES = {
    "Monday": "On Monday we planted beans.",
    "Tuesday": "On Tuesday it rained all day.",
}


class NoteRetriever:
    """Finds the notes that share a word with the query."""

    async def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        return [self._find(query)[:top_k] for query in queries]

    def _find(self, query: str) -> list[Passage]:
        words = set(query.lower().split())
        return [
            Passage(id=day, title=day, text=note)
            for day, note in NOTES.items()
            if words & set(note.lower().rstrip(".").split())
        ]


script = [
    '<mem>nothing yet</mem><think>search</think><tool_call>{"name": "search", "arguments": {"query": "planted beans"}}'
    "</tool_call>",
    "<mem>beans: Monday</mem><think>done</think><answer>Monday</answer>",
]
trajectory = Agent(ScriptedPolicy(script), [SearchTool(NoteRetriever(), top_k=2)]).run("When did we plant beans?")
print(trajectory.turns[0].observation)
print(trajectory.answer)
