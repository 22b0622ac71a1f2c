"""An agent with a real model, in this process, that searches a few passages.

The bundled model is tiny and was not trained for this: expect an agent that ends in a malformed turn.
Any other model works the same way, and so does a server: `OpenAIPolicy("http://127.0.0.1:8080/v1", "name")`.
"""

from mempo import Agent
from mempo.config import ContextConfig, RolloutConfig
from mempo.core import Passage
from mempo.env import SearchTool
from mempo.policy.local import LocalPolicy
from mempo.retrieval.memory import MemoryRetriever

passages = [
    Passage("1", "Jaws", "Jaws is a film of 1975. It was directed by Steven Spielberg."),
    Passage("2", "Steven Spielberg", "Steven Spielberg is a film director. He was born in Cincinnati, Ohio."),
]

agent = Agent(
    LocalPolicy.load("bundled:smollm2"),
    [SearchTool(MemoryRetriever(passages))],
    rollout=RolloutConfig(max_turns=3, max_response_tokens=100, temperature=0.3),
    context=ContextConfig(prompts="compact"),
)
trajectory = agent.run("Where was the director of Jaws born?")
for turn in trajectory.turns:
    print(f"turn {turn.index}: {turn.text!r}")
print(f"{trajectory.stop.value}: {trajectory.answer}; {trajectory.total_tokens} tokens")
