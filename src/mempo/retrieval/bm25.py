"""BM25 (Lucene's formula) through bm25s, on arrays that are mapped from disk.

The index is built in two passes over chunks of the corpus, so that memory holds the vocabulary and
one chunk, never the corpus: the first writes each chunk's (term, passage, frequency) triples, the
second weighs them and puts them in their places. The files are bm25s's own.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from mempo.core import ConfigError, DataError, MissingExtraError, Passage
from mempo.core.files import atomic_write
from mempo.retrieval.corpus import Progress, no_progress

CHUNK_PASSAGES = 50_000
SCORES, PLACES, STARTS = "data.csc.index.npy", "indices.csc.index.npy", "indptr.csc.index.npy"
VOCABULARY, PARAMETERS = "vocab.index.json", "params.index.json"

Hit = tuple[int, float]
"""A passage's row and its score; larger is better."""
_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class Bm25Options:
    """How texts become terms, and BM25's two numbers.

    The defaults were the best of a small grid on HotpotQA, 2WikiMultihopQA and MuSiQue
    (docs/retrieval.md).
    """

    k1: float = 0.9
    """How fast repeated words stop counting."""
    b: float = 0.4
    """How much long passages are held back, from 0 to 1."""
    stemmer: Literal["english", "none"] = "english"
    """`english`: Snowball's."""
    stopwords: Literal["english", "none"] = "english"
    title_weight: int = 2
    """How often the title counts beside the text."""

    def __post_init__(self) -> None:
        if not (self.k1 >= 0 and 0 <= self.b <= 1 and self.title_weight >= 0):
            raise ConfigError(f"k1 and title_weight must be at least 0 and b within [0, 1]: {self}")


class Analyzer:
    """Texts to terms: lower case, words, stop words out, stems.

    >>> Analyzer(Bm25Options()).terms("The running dogs of Café-Olé")
    ['run', 'dog', 'café', 'olé']
    """

    def __init__(self, options: Bm25Options) -> None:
        self._title_weight = options.title_weight
        self._stop = _stopwords(options.stopwords)
        self._stem = _stemmer(options.stemmer)

    def words(self, text: str) -> list[str]:
        """Lower-case words as they stand."""
        return _WORD.findall(text.lower())

    def term(self, word: str) -> str | None:
        """The term of a word; None for a stop word."""
        return None if word in self._stop else self._stem(word)

    def terms(self, text: str) -> list[str]:
        return [term for word in self.words(text) if (term := self.term(word)) is not None]

    def passage_words(self, passage: Passage) -> list[str]:
        return self._title_weight * self.words(passage.title) + self.words(passage.text)


class Bm25Index:
    """Scores all passages that share a term with the query; the others are not hits."""

    def __init__(self, scorer: Any, analyzer: Analyzer) -> None:
        self._scorer = scorer  # a bm25s.BM25
        self._analyzer = analyzer
        # Plain views: slicing a numpy memmap object costs several times as much.
        self._scorer.scores = {
            key: np.asarray(value) if isinstance(value, np.ndarray) else value for key, value in scorer.scores.items()
        }

    @classmethod
    def open(cls, folder: Path, options: Bm25Options) -> Bm25Index:
        """An index that `build` wrote with the same options."""
        scorer = _bm25s().BM25.load(folder, mmap=True, load_vocab=False, show_progress=False)
        # Read here: bm25s takes three times as long for the words of a million passages.
        scorer.vocab_dict = msgspec.json.decode((folder / VOCABULARY).read_bytes(), type=dict[str, int])
        return cls(scorer, Analyzer(options))

    @classmethod
    def from_passages(cls, passages: Iterable[Passage], options: Bm25Options) -> Bm25Index:
        """An index in memory, for small corpora. Raises DataError where no passage has a term."""
        analyzer = Analyzer(options)
        vocabulary: dict[str, int] = {}
        rows = [
            [
                vocabulary.setdefault(term, len(vocabulary))
                for word in words
                if (term := analyzer.term(word)) is not None
            ]
            for words in map(analyzer.passage_words, passages)
        ]
        _check_terms(len(vocabulary))
        scorer = _bm25s().BM25(k1=options.k1, b=options.b)
        scorer.index((rows, vocabulary), show_progress=False)
        return cls(scorer, analyzer)

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        """The best rows of each query: score descending, then row ascending; scores are above 0."""
        return [self._search_one(query, top_k) for query in queries]

    def _search_one(self, query: str, top_k: int) -> list[Hit]:
        terms = self._scorer.get_tokens_ids(self._analyzer.terms(query))
        if not terms or top_k < 1:
            return []
        return best(self._scorer.get_scores_from_ids(terms), top_k)


def best(scores: npt.NDArray[np.float32], top_k: int) -> list[Hit]:
    """The `top_k` largest positive scores with their places; ties go to the smaller place.

    >>> best(np.array([0.0, 2.0, 3.0, 2.0], dtype=np.float32), 2)
    [(2, 3.0), (1, 2.0)]
    """
    rows = np.flatnonzero(scores > 0)  # few of many: all that follows is small
    positive = scores[rows]
    if len(rows) > top_k:
        # Everything that reaches the k-th largest score: ties are then settled by place, not by chance.
        least = np.partition(positive, -top_k)[-top_k]
        reaching = np.flatnonzero(positive >= least)
        rows, positive = rows[reaching], positive[reaching]
    order = np.argsort(-positive, kind="stable")[:top_k]
    return [(int(rows[place]), float(positive[place])) for place in order]


def build(
    passages: Iterable[Passage], count: int, folder: Path, options: Bm25Options, progress: Progress = no_progress
) -> None:
    """Index `count` passages into the new folder `folder`, in bm25s's files.

    Raises DataError where no passage has a term.
    """
    analyzer = Analyzer(options)
    chunks = folder / "chunks"
    chunks.mkdir(parents=True)
    vocabulary: dict[str, int] = {}
    lengths = np.zeros(count, dtype=np.float32)
    frequencies = np.zeros(0, dtype=np.int64)
    paths = []
    for first, rows in _term_chunks(passages, analyzer, vocabulary):
        sizes = np.array([len(row) for row in rows])
        lengths[first : first + len(rows)] = sizes
        terms = np.fromiter((term for row in rows for term in row), dtype=np.int64, count=int(sizes.sum()))
        places = np.repeat(np.arange(first, first + len(rows)), sizes)
        keys, repeats = np.unique((terms << 32) | places, return_counts=True)
        triples = np.stack([keys >> 32, keys & 0xFFFFFFFF, repeats]).astype(np.int32)
        paths.append(chunks / f"{first}.npy")
        np.save(paths[-1], triples)
        frequencies = _longer(frequencies, len(vocabulary)) + np.bincount(triples[0], minlength=len(vocabulary))
        progress("counting terms", min(first + len(rows), count), count)
    _check_terms(len(vocabulary))
    _place(paths, folder, frequencies, lengths, options, progress)
    with atomic_write(folder / VOCABULARY) as file:
        # The empty term stands for queries without terms; bm25s expects it.
        json.dump({**vocabulary, "": len(vocabulary)}, file, ensure_ascii=False)
    with atomic_write(folder / PARAMETERS) as file:
        json.dump(_parameters(options, count), file)
    for path in paths:
        path.unlink()
    chunks.rmdir()


def _term_chunks(
    passages: Iterable[Passage], analyzer: Analyzer, vocabulary: dict[str, int]
) -> Iterator[tuple[int, list[list[int]]]]:
    """The term numbers of the passages, some at a time, each with the row of its first passage."""
    known: dict[str, int] = {}  # word -> term number, or -1 for a stop word: each word is stemmed once

    def number(word: str) -> int:
        term = analyzer.term(word)
        known[word] = -1 if term is None else vocabulary.setdefault(term, len(vocabulary))
        return known[word]

    source, first = iter(passages), 0
    while chunk := list(islice(source, CHUNK_PASSAGES)):
        rows = []
        for passage in chunk:
            numbers = [known[w] if w in known else number(w) for w in analyzer.passage_words(passage)]
            rows.append([term for term in numbers if term >= 0])
        yield first, rows
        first += len(chunk)


def _place(
    paths: Sequence[Path],
    folder: Path,
    frequencies: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.float32],
    options: Bm25Options,
    progress: Progress,
) -> None:
    """Weigh the triples and write them by term, each term's passages in order."""
    count, postings = len(lengths), int(frequencies.sum())
    starts = np.concatenate([[0], np.cumsum(frequencies)])
    idf = np.array([math.log(1 + (count - n + 0.5) / (n + 0.5)) for n in frequencies.tolist()], dtype=np.float32)
    norms = options.k1 * (1 - options.b + options.b * lengths / max(float(lengths.mean()), 1e-9))
    scores = _allocate(folder / SCORES, postings, np.dtype(np.float32))
    places = _allocate(folder / PLACES, postings, np.dtype(np.int32))
    heads = starts[:-1].copy()
    for number, path in enumerate(paths, start=1):
        terms, rows, repeats = np.load(path)
        if len(terms) == 0:
            continue
        edges = np.flatnonzero(np.diff(terms, prepend=-1))  # triples are sorted by term, then passage
        sizes = np.diff(np.append(edges, len(terms)))
        targets = heads[terms] + np.arange(len(terms)) - np.repeat(edges, sizes)
        scores[targets] = idf[terms] * (repeats / (repeats + norms[rows]))
        places[targets] = rows
        heads[terms[edges]] += sizes
        progress("weighing terms", number, len(paths))
    scores.flush()
    places.flush()
    # One more, empty, column: the empty term of the vocabulary.
    np.save(folder / STARTS, np.append(starts, starts[-1]))


def _allocate(path: Path, length: int, dtype: np.dtype[Any]) -> np.memmap[Any, Any]:
    """A new array on disk, really written: a sparse one would kill the process on a full disk."""
    array = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=(length,))
    block = bytes(1 << 20)
    with open(path, "r+b") as file:
        file.seek(array.offset)
        left = length * dtype.itemsize
        while left > 0:
            left -= file.write(block[: min(left, len(block))])
    return array


def _parameters(options: Bm25Options, count: int) -> dict[str, Any]:
    return {
        "k1": options.k1,
        "b": options.b,
        "delta": 0.5,
        "method": "lucene",
        "idf_method": "lucene",
        "dtype": "float32",
        "int_dtype": "int32",
        "num_docs": count,
        "version": _bm25s().__version__,
        "backend": "numpy",
    }


def _check_terms(terms: int) -> None:
    if terms == 0:
        raise DataError("no passage holds a word to search for: check the corpus, or keep its stop words")


def _longer(array: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.int64]:
    return np.concatenate([array, np.zeros(length - len(array), dtype=np.int64)])


def _bm25s() -> Any:
    try:
        import bm25s
    except ImportError as error:
        raise MissingExtraError("bm25s", extra="serve") from error
    return bm25s


def _stopwords(name: str) -> frozenset[str]:
    return frozenset(_bm25s().stopwords.STOPWORDS_EN) if name == "english" else frozenset()


def _stemmer(name: str) -> Callable[[str], str]:
    if name == "none":
        return lambda word: word
    try:
        import Stemmer
    except ImportError as error:
        raise MissingExtraError("PyStemmer", extra="serve") from error
    stem: Callable[[str], str] = Stemmer.Stemmer("english").stemWord
    return stem
