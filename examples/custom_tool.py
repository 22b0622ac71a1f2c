"""A function as a tool: its type hints become the schema, its docstring the description."""

from typing import Literal

from mempo import Agent
from mempo.policy.scripted import ScriptedPolicy
from mempo.text.prompts import system_prompt


def convert(amount: float, unit: Literal["km", "miles"]) -> str:
    """Convert a distance to the other unit.

    Args:
        amount: how many
        unit: the unit of the amount
    """
    return f"{amount * 1.609:.1f} km" if unit == "miles" else f"{amount / 1.609:.1f} miles"


# A script in the place of a model, so that the example needs none: the second call has a wrong unit.
script = [
    '<mem>nothing yet</mem><think>convert</think><tool_call>{"name": "convert", "arguments": '
    '{"amount": 26, "unit": "leagues"}}</tool_call>',
    '<mem>the unit must be km or miles</mem><think>again</think><tool_call>{"name": "convert", "arguments": '
    '{"amount": 26, "unit": "miles"}}</tool_call>',
    "<mem>26 miles are 41.8 km</mem><think>done</think><answer>41.8 km</answer>",
]
agent = Agent(ScriptedPolicy(script), [convert])
trajectory = agent.run("How many kilometres are 26 miles?")

print(system_prompt(agent.tools, objectives=1).split("Tools:\n")[1].splitlines()[0])
for turn in trajectory.turns:
    print(f"{turn.call} -> {turn.observation}")
print(trajectory.answer)
