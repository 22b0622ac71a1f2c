"""Turns as they happen: in plain code, and among other coroutines."""

import asyncio

from mempo import Agent
from mempo.policy.scripted import ScriptedPolicy


async def search(query: str) -> str:
    """Search an encyclopedia."""
    await asyncio.sleep(0.05)
    return f"{query}: Paris"


script = [
    '<mem>nothing yet</mem><think>search</think><tool_call>{"name": "search", "arguments": {"query": "France"}}'
    "</tool_call>",
    "<mem>Paris</mem><think>done</think><answer>Paris; unknown</answer>",
]
agent = Agent(ScriptedPolicy(script), [search])

for turn in agent.stream(["Capital of France?", "Capital of Ardenvale?"]):
    print(f"turn {turn.index}: {turn.call or turn.answer}")


async def first_memory(question: str) -> str | None:
    """Leaving early ends the trajectory."""
    async for turn in agent.astream(question):
        return turn.memory
    return None


async def main() -> None:
    async with agent:
        print(await asyncio.gather(first_memory("Capital of France?"), first_memory("Capital of Peru?")))


asyncio.run(main())
