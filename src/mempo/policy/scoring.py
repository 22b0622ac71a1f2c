"""Log-probabilities of given tokens after given prompts, without gradient.

Requests that share a prefix form a tree whose tokens run through the model once: each token attends
to its ancestors only. So the probes of all memories of a task pay for its question once, and the
`prefix` baseline of a trajectory's T turns is one pass over the trajectory instead of T. A tree's longest
path, its trunk, is plain causal attention; the branches follow in a second pass and find the trunk's keys
and values in the cache, so only their attention, and not that of the whole tree, goes through a mask.
Identical requests are computed once, and the vocabulary projection, by far the largest tensor, is made
for target tokens only, in chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PreTrainedModel

from mempo.core import ScoreRequest
from mempo.policy.models import hidden_states, projection

MIN_SHARED_TOKENS = 32
"""Below this, a shared prefix is cheaper to run again than to mask."""
MAX_TREE_TOKENS = 4096
"""A tree of many short branches never grows beyond this: its mask is quadratic in its size."""
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
    distinct = {request for request in requests if request.target_ids}
    sharing = share and not _slides(model)
    width = model.config.get_text_config().hidden_size
    trees = plan_trees(sorted(distinct, key=_ids), width if sharing else 0)
    results: dict[ScoreRequest, tuple[float, ...]] = {}
    project = projection(model)
    for batch in _batches(trees, batch_tokens):
        results.update(_score_batch(model, project, batch, temperature, pad_id))
    return [results[request] if request.target_ids else () for request in requests]


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens `[start, end)` of a tree that follow the token at `parent` (-1: the first ones)."""

    start: int
    end: int
    parent: int


@dataclass(slots=True)
class Tree:
    """Requests with a common head, each token held once; parents stand before children."""

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    """Depth of each token: its position in its request."""
    segments: list[Segment] = field(default_factory=list)
    requests: list[tuple[ScoreRequest, list[int]]] = field(default_factory=list)
    """Each request with the places in `ids` of the tokens that predict its targets."""
    trunk: list[int] = field(default_factory=list)
    """Places of the tokens of the longest request."""
    _path: list[int] = field(default_factory=list)
    """Places of the latest request's tokens."""

    def add(self, request: ScoreRequest, shared: int) -> None:
        """Append a request whose first `shared` tokens are those of the latest one."""
        fresh = _ids(request)[shared:]
        start = len(self.ids)
        parent = self._path[shared - 1] if shared else -1
        self.segments.append(Segment(start, start + len(fresh), parent))
        self._path = self._path[:shared] + list(range(start, start + len(fresh)))
        self.ids += fresh
        self.positions += range(shared, shared + len(fresh))
        self.requests.append((request, self._path[len(request.prompt_ids) - 1 :]))
        if len(self._path) > len(self.trunk):
            self.trunk = self._path

    @property
    def branches(self) -> list[int]:
        """Places of the tokens beside the trunk, parents before children."""
        trunk = set(self.trunk)
        return [place for place in range(len(self.ids)) if place not in trunk]

    def mask(self) -> torch.Tensor:
        """`[token, token]`, True where a token (row) attends to a token (column): its ancestors and itself."""
        mask = torch.zeros(len(self.ids), len(self.ids), dtype=torch.bool)
        for start, end, parent in ((segment.start, segment.end, segment.parent) for segment in self.segments):
            if parent >= 0:
                mask[start:end, :start] = mask[parent, :start]
            mask[start:end, start:end] = torch.ones(end - start, end - start, dtype=torch.bool).tril()
        return mask


def plan_trees(ordered: Sequence[ScoreRequest], width: int) -> list[Tree]:
    """Requests, sorted by their ids, as trees; neighbours share the longest prefixes there are.

    A model of `width` hidden units decides what pays: a layer costs a token about as much as attention to
    6 * `width` others, so sharing saves that for each shared token, and costs the attention of what comes to
    stand beside the trunk to the whole tree. Width 0 shares nothing.

    >>> requests = [ScoreRequest((*range(40), last), (7,)) for last in (50, 51)]
    >>> [tree] = plan_trees(requests, 64)
    >>> len(tree.ids), tree.segments[1]
    (42, Segment(start=41, end=42, parent=39))
    """
    trees: list[Tree] = []
    previous: ScoreRequest | None = None
    for request in ordered:
        shared = _shared_tokens(previous, request) if width and previous is not None else 0
        if shared >= MIN_SHARED_TOKENS and _pays(trees[-1], shared, len(_ids(request)), width):
            trees[-1].add(request, shared)
        else:
            trees.append(Tree())
            trees[-1].add(request, 0)
        previous = request
    return trees


def _pays(tree: Tree, shared: int, length: int, width: int) -> bool:
    """Whether a request of `length` tokens, `shared` of them with the latest one, should join the tree."""
    tokens = len(tree.ids) + length - shared
    trunk = max(len(tree.trunk), length)
    beside = (tokens - trunk) - (len(tree.ids) - len(tree.trunk))
    return beside * tokens <= 6 * width * shared and tokens <= max(MAX_TREE_TOKENS, 2 * trunk)


def _ids(request: ScoreRequest) -> tuple[int, ...]:
    # The last target token is predicted, never read.
    return request.prompt_ids + request.target_ids[:-1]


def _shared_tokens(previous: ScoreRequest, request: ScoreRequest) -> int:
    a, b = _ids(previous), _ids(request)
    return next((index for index, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _slides(model: PreTrainedModel) -> bool:
    """A sliding window counts places, not positions, so it would cut a tree's branches wrongly."""
    config = model.config.get_text_config()
    layer_types = getattr(config, "layer_types", None) or ()
    return "sliding_attention" in layer_types or bool(
        not layer_types and getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    )


def too_many_pads(pads: int, padded_tokens: int) -> bool:
    """Whether a batch of so many tokens, pads included, had better be two."""
    return pads > max(MAX_PADS, padded_tokens // PAD_SHARE)


def _batches(trees: Sequence[Tree], batch_tokens: int) -> Iterator[list[Tree]]:
    """Trees of similar size together, at most `batch_tokens` padded tokens a batch (but at least one tree)."""
    batch: list[Tree] = []
    for tree in sorted(trees, key=lambda tree: (len(tree.trunk), len(tree.ids))):
        padded = _padded_tokens([*batch, tree])
        pads = padded - sum(len(one.ids) for one in (*batch, tree))
        if batch and (padded > batch_tokens or too_many_pads(pads, padded)):
            yield batch
            batch = []
        batch.append(tree)
    if batch:
        yield batch


def _padded_tokens(trees: Sequence[Tree]) -> int:
    trunk = max(len(tree.trunk) for tree in trees)
    return len(trees) * (trunk + max(len(tree.ids) - len(tree.trunk) for tree in trees))


def _score_batch(
    model: PreTrainedModel,
    project: Callable[[torch.Tensor], torch.Tensor],
    trees: list[Tree],
    temperature: float,
    pad_id: int,
) -> dict[ScoreRequest, tuple[float, ...]]:
    hidden, columns_of = _tree_states(model, trees, pad_id)
    scored = [
        (row, request, columns_of[row][places]) for row, tree in enumerate(trees) for request, places in tree.requests
    ]
    device = model.device
    rows = torch.tensor([row for row, _, places in scored for _ in places], device=device)
    columns = torch.cat([places for _, _, places in scored]).to(device)
    targets = torch.tensor([token for _, request, _ in scored for token in request.target_ids], device=device)
    chunks = zip(
        torch.split(hidden[rows, columns].float() / temperature, PROJECTION_ROWS),
        torch.split(targets, PROJECTION_ROWS),
        strict=True,
    )
    logprobs = torch.cat([_logprobs(project(part), wanted) for part, wanted in chunks])
    values = iter(torch.split(logprobs, [len(places) for _, _, places in scored]))
    return {request: tuple(next(values).tolist()) for _, request, _ in scored}


def _tree_states(model: PreTrainedModel, trees: Sequence[Tree], pad_id: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Hidden states `[tree, column, width]`, and for each tree the columns of its tokens."""
    device = model.device
    ids = [torch.tensor(tree.ids) for tree in trees]
    trunks = [torch.tensor(tree.trunk) for tree in trees]
    branches = [torch.tensor(tree.branches, dtype=torch.long) for tree in trees]
    trunk_ids = pad_sequence([own[places] for own, places in zip(ids, trunks, strict=True)], True, pad_id)
    width, beside = trunk_ids.shape[1], max(map(len, branches))
    # Pads stand on the right, where causal attention never looks: no mask.
    positions = torch.arange(width, device=device)[None].expand(len(trees), -1)
    cache = DynamicCache(config=model.config) if beside else None
    hidden = hidden_states(model, trunk_ids.to(device), None, positions, cache)
    if beside:
        branch_ids = pad_sequence([own[places] for own, places in zip(ids, branches, strict=True)], True, pad_id)
        depths = [torch.tensor(tree.positions)[places] for tree, places in zip(trees, branches, strict=True)]
        mask = _branch_mask(trees, trunks, branches, width, model.dtype)
        positions = pad_sequence(depths, True).to(device)
        hidden = torch.cat([hidden, hidden_states(model, branch_ids.to(device), mask.to(device), positions, cache)], 1)
    columns = [torch.empty(len(own), dtype=torch.long) for own in ids]
    for own, trunk, branch in zip(columns, trunks, branches, strict=True):
        own[trunk], own[branch] = torch.arange(len(trunk)), width + torch.arange(len(branch))
    return hidden, columns


def _branch_mask(
    trees: Sequence[Tree],
    trunks: Sequence[torch.Tensor],
    branches: Sequence[torch.Tensor],
    width: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Additive `[tree, 1, branch token, trunk and branch token]`; pads see themselves only."""
    beside = max(map(len, branches))
    allowed = torch.zeros(len(trees), beside, width + beside, dtype=torch.bool)
    allowed[:, :, width:] = torch.eye(beside, dtype=torch.bool)
    for own, tree, trunk, branch in zip(allowed, trees, trunks, branches, strict=True):
        rows = tree.mask()[branch]
        own[: len(branch), : len(trunk)] = rows[:, trunk]
        own[: len(branch), width : width + len(branch)] = rows[:, branch]
    return torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)[:, None]


def _logprobs(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits, dim=-1).gather(-1, targets[:, None])[:, 0]
