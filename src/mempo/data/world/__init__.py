"""The embedded world: fictional encyclopedias that need no download and that no model has read."""

from mempo.data.world.closed import (
    DONE,
    FALLBACK_CHARACTERS,
    NEXT,
    NOTHING,
    UNKNOWN,
    ClosedWorld,
    closed_capacity,
    closed_pattern,
    closed_vocabulary,
    closed_worlds,
    split_words,
)
from mempo.data.world.draw import Draw
from mempo.data.world.open import MAX_HOPS, OpenWorld
from mempo.data.world.plan import (
    Fact,
    Plan,
    Split,
    facts_kept,
    facts_needed,
    is_world_task,
    read_plans,
    search_order,
    split_notes,
    states,
)

__all__ = [
    "DONE",
    "FALLBACK_CHARACTERS",
    "MAX_HOPS",
    "NEXT",
    "NOTHING",
    "UNKNOWN",
    "ClosedWorld",
    "Draw",
    "Fact",
    "OpenWorld",
    "Plan",
    "Split",
    "closed_capacity",
    "closed_pattern",
    "closed_vocabulary",
    "closed_worlds",
    "facts_kept",
    "facts_needed",
    "is_world_task",
    "read_plans",
    "search_order",
    "split_notes",
    "split_words",
    "states",
]
