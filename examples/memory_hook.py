"""Read the agent's memory between turns, and replace it: here it may hold 40 characters, no more.

What the policy wrote stays in the record; the next turn sees the replacement.
"""

from mempo import Agent
from mempo.core import Turn
from mempo.policy.scripted import ScriptedPolicy

LIMIT = 40


def shorten(turn: Turn) -> str | None:
    """The memory that the next turn sees; None leaves it as it is."""
    if turn.memory is None or len(turn.memory) <= LIMIT:
        return None
    print(f"turn {turn.index}: {len(turn.memory)} characters of memory, {LIMIT} kept")
    return turn.memory[:LIMIT]


def search(query: str) -> str:
    """Search an encyclopedia."""
    return f"(nothing about {query})"


call = '<tool_call>{"name": "search", "arguments": {"query": "Ardenvale"}}</tool_call>'
script = [
    f"<mem>nothing yet</mem><think>search</think>{call}",
    f"<mem>Ardenvale is not in the encyclopedia, and that is all I know about it.</mem><think>again</think>{call}",
    "<mem>nothing found</mem><think>give up</think><answer>unknown</answer>",
]
trajectory = Agent(ScriptedPolicy(script), [search], edit_memory=shorten).run("Where is Ardenvale?")
print("written: ", trajectory.turns[1].memory)
print("next saw:", trajectory.turns[2].prompt_text.split("<mem>")[-1].split("</mem>")[0])
