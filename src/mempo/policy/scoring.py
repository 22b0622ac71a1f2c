"""Log-probabilities of given tokens after given prompts, without gradient.

Requests that share a prefix form a tree whose tokens run through the model once: each token attends
to its ancestors only. So the probes of all memories of a task pay for its question once, and the
`prefix` baseline of a trajectory's T turns is one pass over the trajectory instead of T. Identical
requests are computed once, and the vocabulary projection, by far the largest tensor, is made for
target tokens only, in chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from mempo.core import ScoreRequest
from mempo.policy.models import hidden_states, projection

MIN_SHARED_TOKENS = 32
"""Below this, a shared prefix is cheaper to run again than to mask."""
MAX_TREE_TOKENS = 4096
"""A tree of many short branches never grows beyond this: its mask is quadratic in its size."""
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
    # Attention costs about as much as the rest of a layer where a row has six times the width's tokens.
    tree_tokens = min(MAX_TREE_TOKENS, 4 * model.config.get_text_config().hidden_size)
    sharing = share and not _slides(model)
    trees = plan_trees(sorted(distinct, key=_ids), tree_tokens if sharing else 0)
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

    @property
    def branches(self) -> bool:
        return len(self.segments) > 1

    def mask(self, width: int) -> torch.Tensor:
        """`[width, width]`, True where a token (row) attends to a token (column); pads see themselves only."""
        mask = torch.eye(width, dtype=torch.bool)
        for start, end, parent in ((segment.start, segment.end, segment.parent) for segment in self.segments):
            if parent >= 0:
                mask[start:end, :start] = mask[parent, :start]
            mask[start:end, start:end] = torch.ones(end - start, end - start, dtype=torch.bool).tril()
        return mask


def plan_trees(ordered: Sequence[ScoreRequest], tree_tokens: int) -> list[Tree]:
    """Requests, sorted by their ids, as trees; neighbours share the longest prefixes there are.

    A tree grows to `tree_tokens`, or to twice its longest path; 0 shares nothing.

    >>> requests = [ScoreRequest((*range(40), last), (7,)) for last in (50, 51)]
    >>> [tree] = plan_trees(requests, 1024)
    >>> len(tree.ids), tree.segments[1]
    (42, Segment(start=41, end=42, parent=39))
    """
    trees: list[Tree] = []
    previous: ScoreRequest | None = None
    for request in ordered:
        shared = _shared_tokens(previous, request) if tree_tokens and previous is not None else 0
        fresh = len(_ids(request)) - shared
        grows = shared >= MIN_SHARED_TOKENS and (shared >= fresh or len(trees[-1].ids) + fresh <= tree_tokens)
        # A long trunk may have its branches, but many short branches may not make a long tree.
        if grows and len(trees[-1].ids) + fresh <= max(tree_tokens, 2 * (shared + fresh)):
            trees[-1].add(request, shared)
        else:
            trees.append(Tree())
            trees[-1].add(request, 0)
        previous = request
    return trees


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


def _batches(trees: Sequence[Tree], batch_tokens: int) -> Iterator[list[Tree]]:
    """Trees of similar size together, at most `batch_tokens` padded tokens a batch (but at least one tree)."""
    batch: list[Tree] = []
    for tree in sorted(trees, key=lambda tree: (tree.branches, len(tree.ids))):
        if batch and (len(batch) + 1) * len(tree.ids) > batch_tokens:
            yield batch
            batch = []
        batch.append(tree)
    if batch:
        yield batch


def _score_batch(
    model: PreTrainedModel,
    project: Callable[[torch.Tensor], torch.Tensor],
    trees: list[Tree],
    temperature: float,
    pad_id: int,
) -> dict[ScoreRequest, tuple[float, ...]]:
    width = max(len(tree.ids) for tree in trees)
    ids = torch.full((len(trees), width), pad_id)
    positions = torch.zeros(len(trees), width, dtype=torch.long)
    for row, tree in enumerate(trees):
        ids[row, : len(tree.ids)] = torch.tensor(tree.ids)
        positions[row, : len(tree.ids)] = torch.tensor(tree.positions)
    device = model.device
    mask = _attention_mask(trees, width, model.dtype)
    hidden = hidden_states(model, ids.to(device), mask.to(device), positions.to(device))

    scored = [(row, request, places) for row, tree in enumerate(trees) for request, places in tree.requests]
    rows = torch.tensor([row for row, _, places in scored for _ in places], device=device)
    columns = torch.tensor([place for _, _, places in scored for place in places], device=device)
    targets = torch.tensor([token for _, request, _ in scored for token in request.target_ids], device=device)
    chunks = zip(
        torch.split(hidden[rows, columns], PROJECTION_ROWS), torch.split(targets, PROJECTION_ROWS), strict=True
    )
    logprobs = torch.cat([_logprobs(project(part) / temperature, wanted) for part, wanted in chunks])
    values = iter(torch.split(logprobs, [len(places) for _, _, places in scored]))
    return {request: tuple(next(values).tolist()) for _, request, _ in scored}


def _attention_mask(trees: list[Tree], width: int, dtype: torch.dtype) -> torch.Tensor:
    """Two-dimensional (1 on tokens) for plain sequences, else additive `[tree, 1, width, width]`."""
    if not any(tree.branches for tree in trees):
        return torch.tensor([[1] * len(tree.ids) + [0] * (width - len(tree.ids)) for tree in trees])
    allowed = torch.stack([tree.mask(width) for tree in trees])[:, None]
    return torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)


def _logprobs(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits, dim=-1).gather(-1, targets[:, None])[:, 0]
