"""Log-probabilities of given tokens after given prompts, without gradient.

Requests that share a prefix form a tree whose tokens run through the model once: the longest request, its
trunk, as plain causal attention, and what the others add, its branches, against the trunk's keys and values in
a cache. So the probes of all memories of a task pay for its question once, and the `prefix` baseline of a
trajectory's T turns is one pass over the trajectory, and few tokens a turn, instead of T passes.

Branches run in several passes from the trunk's end to its beginning, the cache cut to what they attend to;
so no mask spans the whole tree. Identical requests are computed once, and the vocabulary projection, by far
the largest tensor, is made for target tokens only, in chunks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from operator import attrgetter

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PreTrainedModel

from mempo.core import ScoreRequest
from mempo.policy.models import hidden_states, projection

MIN_SHARED_TOKENS = 32
"""Below this, a shared prefix is cheaper to run again than to look up."""
MAX_BRANCH_TOKENS = 256
"""A request that adds more is a trunk: attention through a mask is dearer than causal attention."""
PASS_TOKENS = 128
"""Branch tokens of a tree that run together: with more, much of the attention would be masked out."""
MAX_PADS = 256
"""Pads that a batch may always have: about what the fixed cost of one more batch would compute."""
PAD_SHARE = 16
"""A large batch may have one pad in so many tokens: a GPU wants few large batches."""
PROJECTION_ROWS = 1024
"""Target tokens that are projected on the vocabulary at once."""


@torch.inference_mode()
def score_targets(
    model: PreTrainedModel,
    requests: Sequence[ScoreRequest],
    *,
    batch_tokens: int = 16_384,
    temperature: float = 1.0,
    pad_id: int = 0,
    share: bool = True,
) -> list[tuple[float, ...]]:
    """`log p(target token | prompt, earlier target tokens)` for each target token, one tuple a request, in order.

    Every prompt has at least one token (the first target needs something to follow); a target may be
    empty. `share=False` runs each request on its own, for comparison: the values agree within 1e-5 in fp32.
    """
    for index, request in enumerate(requests):
        if not request.prompt_ids:
            raise ValueError(f"score request {index} has an empty prompt: its first target token follows nothing")
    trunks = plan_trees({request for request in requests if request.target_ids}, share=share and can_share(model))
    results: dict[ScoreRequest, tuple[float, ...]] = {}
    project = projection(model)
    for batch in _batches(trunks, batch_tokens):
        results.update(_score_batch(model, project, batch, temperature, pad_id))
    return [results[request] if request.target_ids else () for request in requests]


def can_share(model: PreTrainedModel) -> bool:
    """Whether a cache of the model can be cut and continued: not one of a sliding window or a recurrent state."""
    config = model.config.get_text_config()
    if layer_types := getattr(config, "layer_types", None):
        return set(layer_types) == {"full_attention"}
    return not (getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True))


@dataclass(slots=True, eq=False)
class Node:
    """A request in a tree: `shared` tokens of its parent, then its own. A trunk has no parent."""

    request: ScoreRequest
    ids: tuple[int, ...]
    """What the model reads: the last target token is predicted only."""
    parent: Node | None = None
    shared: int = 0
    branches: list[Node] = field(default_factory=list)
    column: int = 0
    """Where its own tokens begin in its tree's row of hidden states; known once they have run."""

    @property
    def own_ids(self) -> tuple[int, ...]:
        return self.ids[self.shared :]

    def family(self) -> Iterator[Node]:
        """It and all that hang off it, parents before children."""
        yield self
        for branch in self.branches:
            yield from branch.family()

    def passes(self) -> list[list[Node]]:
        """A trunk's branches, the deepest first, those that run together in one list; families stay together."""
        passes: list[list[Node]] = []
        room = 0
        for branch in sorted(self.branches, key=attrgetter("shared"), reverse=True):
            family = list(branch.family())
            room -= _own_tokens(family)
            if room < 0 or not passes:
                passes.append([])
                room = PASS_TOKENS - _own_tokens(family)
            passes[-1] += family
        return passes

    def shared_columns(self) -> list[range]:
        """Where the states of the shared tokens are: the parent's, its parent's and so on to the trunk's."""
        spans: list[range] = []
        node = self
        while node.parent is not None:
            first = node.parent.column
            spans.append(range(first, first + node.shared - node.parent.shared))
            node = node.parent
        return spans

    def target_columns(self) -> list[int]:
        """Where the states are that predict the targets."""
        spans = [*reversed(self.shared_columns()), range(self.column, self.column + len(self.own_ids))]
        return [column for span in spans for column in span][len(self.request.prompt_ids) - 1 :]


def plan_trees(requests: Iterable[ScoreRequest], *, share: bool = True) -> list[Node]:
    """The trunks. Each request, the longest first, becomes a branch of the one that it shares most with, or a trunk.

    >>> [trunk] = plan_trees(ScoreRequest((*range(40), last), (7,)) for last in (50, 51))
    >>> [(node.shared, len(node.own_ids)) for node in trunk.family()]
    [(0, 41), (40, 1)]
    """
    trunks: list[Node] = []
    placed: list[Node] = []  # sorted by ids, so that what a request shares most with stands beside it
    nodes = [Node(request, request.prompt_ids + request.target_ids[:-1]) for request in requests]
    for node in sorted(nodes, key=lambda node: (-len(node.ids), node.ids, node.request.target_ids)):
        place = bisect_left(placed, node.ids, key=attrgetter("ids"))
        if share:
            node.parent, node.shared = _parent(node.ids, placed[max(0, place - 1) : place + 1])
        (node.parent.branches if node.parent else trunks).append(node)
        placed.insert(place, node)
    return trunks


def _parent(ids: tuple[int, ...], neighbours: Sequence[Node]) -> tuple[Node | None, int]:
    """What a request with these ids becomes a branch of, and how much they share."""
    shared, parent = max(
        ((_shared_tokens(ids, node.ids), node) for node in neighbours), key=lambda pair: pair[0], default=(0, None)
    )
    if shared < MIN_SHARED_TOKENS or len(ids) - shared > min(shared, MAX_BRANCH_TOKENS):
        return None, 0
    while parent is not None and shared <= parent.shared:  # those tokens are the parent's parent's
        parent = parent.parent
    return parent, shared


def _shared_tokens(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next((index for index, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _own_tokens(nodes: Iterable[Node]) -> int:
    return sum(len(node.ids) - node.shared for node in nodes)


def too_many_pads(pads: int, padded_tokens: int) -> bool:
    """Whether a batch of so many tokens, pads included, had better be two."""
    return pads > max(MAX_PADS, padded_tokens // PAD_SHARE)


def _batches(trunks: Sequence[Node], batch_tokens: int) -> Iterator[list[Node]]:
    """Trees of similar size together, at most `batch_tokens` padded tokens a batch (but at least one tree)."""
    sized = [([len(trunk.ids), *map(_own_tokens, trunk.passes())], trunk) for trunk in trunks]
    batch: list[Node] = []
    widths: list[int] = []  # of the trunks, and of each pass over branches
    tokens = 0
    for sizes, trunk in sorted(sized, key=lambda pair: pair[0]):
        widths = [max(pair) for pair in zip_longest(widths, sizes, fillvalue=0)]
        padded = (len(batch) + 1) * sum(widths)
        if batch and (padded > batch_tokens or too_many_pads(padded - tokens - sum(sizes), padded)):
            yield batch
            batch, widths, tokens = [], sizes, 0
        batch.append(trunk)
        tokens += sum(sizes)
    if batch:
        yield batch


def _score_batch(
    model: PreTrainedModel,
    project: Callable[[torch.Tensor], torch.Tensor],
    trunks: list[Node],
    temperature: float,
    pad_id: int,
) -> dict[ScoreRequest, tuple[float, ...]]:
    hidden = _tree_states(model, trunks, pad_id)
    scored = [(row, node.request, node.target_columns()) for row, trunk in enumerate(trunks) for node in trunk.family()]
    rows = torch.tensor([row for row, _, columns in scored for _ in columns], device=model.device)
    columns = torch.tensor([column for _, _, columns in scored for column in columns], device=model.device)
    targets = torch.tensor([token for _, request, _ in scored for token in request.target_ids], device=model.device)
    chunks = zip(
        torch.split(hidden[rows, columns].float() / temperature, PROJECTION_ROWS),
        torch.split(targets, PROJECTION_ROWS),
        strict=True,
    )
    logprobs = iter(torch.cat([_logprobs(project(part), wanted) for part, wanted in chunks]).tolist())
    return {request: tuple(next(logprobs) for _ in columns) for _, request, columns in scored}


def _tree_states(model: PreTrainedModel, trunks: Sequence[Node], pad_id: int) -> torch.Tensor:
    """Hidden states `[tree, column, width]`: the trunks', then those of each pass over branches."""
    device = model.device
    passes = list(zip_longest(*(trunk.passes() for trunk in trunks), fillvalue=[]))
    cache = DynamicCache(config=model.config) if passes else None
    ids = _padded([trunk.ids for trunk in trunks], pad_id)
    column = cached = ids.shape[1]
    positions = torch.arange(column).expand(len(trunks), -1)
    # Pads stand on the right, where causal attention never looks: no mask.
    states = [hidden_states(model, ids.to(device), None, positions.to(device), cache)]
    for rows in passes:
        _place(rows, column)
        ids = _padded([[token for node in nodes for token in node.own_ids] for nodes in rows], pad_id)
        positions = _padded([[p for node in nodes for p in range(node.shared, len(node.ids))] for nodes in rows], 0)
        depth = max(node.shared_columns()[-1].stop for nodes in rows for node in nodes)
        if cache is not None and ids.shape[1]:
            if depth < cached:
                cache.crop(depth - cached)  # a negative number of tokens; 0 means none of them to some releases
            mask = _mask(rows, column, ids.shape[1], depth, model.dtype)
            states.append(hidden_states(model, ids.to(device), mask.to(device), positions.to(device), cache))
            column, cached = column + ids.shape[1], depth + ids.shape[1]
    return torch.cat(states, dim=1)


def _place(rows: Sequence[Sequence[Node]], column: int) -> None:
    """Let the own tokens of each row's nodes stand side by side, from a column on."""
    for nodes in rows:
        after = column
        for node in nodes:
            node.column, after = after, after + len(node.own_ids)


def _mask(rows: Sequence[Sequence[Node]], column: int, width: int, depth: int, dtype: torch.dtype) -> torch.Tensor:
    """Additive `[tree, 1, branch token, trunk and branch token]`, for a cache of `depth` tokens of the trunk.

    A token sees what its request shares, and what is its own up to itself; pads see themselves only.
    """
    allowed = torch.zeros(len(rows), width, depth + width, dtype=torch.bool)
    allowed[:, :, depth:] = torch.eye(width, dtype=torch.bool)
    for row, nodes in zip(allowed, rows, strict=True):
        for node in nodes:
            first, count = node.column - column, len(node.own_ids)
            own = row[first : first + count]
            own[:, depth + first : depth + first + count] = torch.ones(count, count, dtype=torch.bool).tril()
            *on_branches, on_trunk = node.shared_columns()
            own[:, : on_trunk.stop] = True
            for span in on_branches:
                own[:, depth + span.start - column : depth + span.stop - column] = True
    return torch.zeros(allowed.shape, dtype=dtype).masked_fill_(~allowed, torch.finfo(dtype).min)[:, None]


def _padded(rows: Iterable[Sequence[int]], pad: int) -> torch.Tensor:
    return pad_sequence([torch.tensor(row, dtype=torch.long) for row in rows], batch_first=True, padding_value=pad)


def _logprobs(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits, dim=-1).gather(-1, targets[:, None])[:, 0]
