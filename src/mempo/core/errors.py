"""One error tree, so that a caller can catch as much or as little as it means to.

    MempoError
    ├── ConfigError            a setting is unknown, of the wrong type or contradicts another   (ValueError)
    ├── DataError              a file's content is wrong; names file, line, field and value      (ValueError)
    │   └── RunLogError        a run log is foreign or of an unknown schema version
    ├── RenderError            messages cannot be turned into token ids                          (ValueError)
    ├── RetrievalError         a search could not be answered                                    (RuntimeError)
    │   ├── IndexFileError     an index is cut, foreign or belongs to another corpus
    │   └── WrongServiceError  the server that answers is not the one that was meant
    ├── PolicyError            a policy could not generate                                       (RuntimeError)
    │   ├── ContextOverflowError     the prompt leaves no room for an answer
    │   └── ScoringUnavailableError  the policy cannot give log-probabilities of given tokens
    ├── ToolError              a tool refused its arguments or failed                            (RuntimeError)
    ├── TrainingError          a step cannot go on, e.g. a loss that is not a number             (RuntimeError)
    │   └── CheckpointError    a checkpoint is cut, foreign or of another run
    └── MissingExtraError      an optional dependency is not installed                           (ImportError)

Each error also inherits the standard one named at the right. Messages say what is wrong, where,
and what to do about it; the command line prints them without a traceback.
"""

from __future__ import annotations


class MempoError(Exception):
    """Base of every error that mempo raises on purpose."""


class ConfigError(MempoError, ValueError):
    """A setting is unknown, has the wrong type or contradicts another one."""


class DataError(MempoError, ValueError):
    """The content of a file is wrong.

    >>> print(DataError("gold answer is empty", file="tasks.jsonl", line=3, field="answers", value=[""]))
    tasks.jsonl, line 3, field 'answers': gold answer is empty (value: [''])
    """

    def __init__(
        self,
        message: str,
        *,
        file: str | None = None,
        line: int | None = None,
        field: str | None = None,
        value: object = None,
    ) -> None:
        self.message, self.file, self.line, self.field, self.value = message, file, line, field, value
        place = [str(file)] if file is not None else []
        place += [f"line {line}"] if line is not None else []
        place += [f"field {field!r}"] if field is not None else []
        shown = "" if value is None else f" (value: {_shortened(repr(value))})"
        super().__init__(f"{', '.join(place)}: {message}{shown}" if place else f"{message}{shown}")


class RunLogError(DataError):
    """A run log is foreign or of a schema version that this release does not read."""


class RenderError(MempoError, ValueError):
    """Messages cannot be rendered to token ids, e.g. the chat template refuses a role."""


class RetrievalError(MempoError, RuntimeError):
    """A search could not be answered."""


class IndexFileError(RetrievalError):
    """An index on disk is cut, foreign, or belongs to another corpus."""


class WrongServiceError(RetrievalError):
    """The server that answers is not the retriever that was meant."""


class PolicyError(MempoError, RuntimeError):
    """A policy could not generate."""


class ContextOverflowError(PolicyError):
    """The prompt leaves no room for an answer in the policy's context."""


class ScoringUnavailableError(PolicyError):
    """The policy cannot give the log-probabilities of given tokens (most hosted servers)."""


class ToolError(MempoError, RuntimeError):
    """A tool refused its arguments or failed; the message is shown to the model."""


class TrainingError(MempoError, RuntimeError):
    """An optimiser step cannot go on, e.g. a loss that is not a number."""


class CheckpointError(TrainingError):
    """A checkpoint is cut, foreign, or belongs to another run."""


class MissingExtraError(MempoError, ImportError):
    """An optional dependency is not installed.

    >>> print(MissingExtraError("pyarrow", extra="data"))
    pyarrow is not installed; run in the folder of mempo's source: pip install -e '.[data]'
    """

    def __init__(self, package: str, *, extra: str) -> None:
        # mempo is on no package index.
        super().__init__(
            f"{package} is not installed; run in the folder of mempo's source: pip install -e '.[{extra}]'"
        )


def _shortened(text: str, limit: int = 200) -> str:
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
