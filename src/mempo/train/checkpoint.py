"""Checkpoints: everything a run needs to go on exactly where it was.

    batch-000010/
      model/            a Hugging Face folder: all weights or the adapter, and the tokenizer
      optimizer.pt      moments of AdamW
      replay.jsonl      the groups that replay remembers
      config.toml       every setting
      manifest.json     batches, steps, and size and SHA-256 of every other file

A checkpoint is written to a hidden folder beside its place, synced to the disk and renamed, then the
file `latest` names it, and only then are older ones removed: at every moment one whole checkpoint
is there. No generator's state is needed: each draw of training is named by a seed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import PreTrainedModel

from mempo.config import Config, key_values, load_config, render_toml
from mempo.config.sections import Count
from mempo.core import CheckpointError, ConfigError, MempoError, Task
from mempo.core.files import atomic_write
from mempo.policy.models import load_adapter, load_tokenizer, quiet
from mempo.train.assembly import TINY, base_model
from mempo.train.reference import POLICY_ADAPTER, is_adapted, start_sha256
from mempo.train.trainer import Trainer

SCHEMA = "mempo.checkpoint"
VERSION = 1
POINTER = "latest"
EXPORT_MARK = "mempo_export.json"
"""Tells an export, which the next one may replace, from a model of the user's."""

SAME_RUN = ("seed", "model.path", "model.dtype", "model.lora", "model.tiny", "tasks.shuffle", "train.batch_tasks")
"""Settings that a resumed run shares with its checkpoint: others would change what was done before it."""

_NAME = re.compile(r"batch-(\d{6,})")
_ASIDE = re.compile(rf"\.(batch-\d+|{POINTER})\..*tmp")


class FileEntry(msgspec.Struct, frozen=True):
    """What a file of a checkpoint must be."""

    bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint says about itself."""

    schema: str
    version: int
    batches_done: Count
    steps_done: Count
    tasks_sha256: str
    """Of the ids of the tasks that the run trains on, in order."""
    start: dict[str, str] = {}
    """Of the weights that the run started from, by the setting that names them."""
    files: dict[str, FileEntry]
    """By path inside the checkpoint."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint on the disk: every file is there, with the size and hash of the manifest."""

    path: Path
    manifest: Manifest

    @property
    def model_folder(self) -> Path:
        return self.path / "model"

    @property
    def config(self) -> Config:
        return load_config(self.path / "config.toml")

    @property
    def model_files(self) -> list[Path]:
        """What was written there: a folder on a disk may have got other files since, e.g. of a file manager."""
        return [self.path / name for name in sorted(self.manifest.files) if Path(name).parent == Path("model")]


# ---------------------------------------------------------------- saving


def save_checkpoint(trainer: Trainer, tokenizer: Any, config: Config, folder: Path) -> Checkpoint:
    """Write the state of a run to `folder/batch-NNNNNN`, and remove all but the `config.checkpoint.keep` newest.

    Raises CheckpointError where it cannot be written, e.g. to a full disk; the checkpoints that were
    there are then still there.
    """

    def write(aside: Path) -> None:
        save_model(trainer.model, tokenizer, aside / "model")
        torch.save(trainer.optimizer.state_dict(), aside / "optimizer.pt")
        trainer.replay.write(aside / "replay.jsonl")
        (aside / "config.toml").write_text(render_toml(config), encoding="utf-8")

    return write_checkpoint(
        folder,
        write,
        batches_done=trainer.batches_done,
        steps_done=trainer.steps_done,
        tasks_sha256=tasks_sha256(trainer.tasks),
        start=trainer.start,
        keep=config.checkpoint.keep,
    )


def write_checkpoint(
    folder: Path,
    write: Callable[[Path], None],
    *,
    batches_done: int,
    steps_done: int,
    tasks_sha256: str,
    keep: int,
    start: dict[str, str] | None = None,
) -> Checkpoint:
    """What `write` puts into a folder, with a manifest, as `folder/batch-NNNNNN`; only the `keep` newest stay.

    Raises CheckpointError as `save_checkpoint`.
    """
    place = folder / f"batch-{batches_done:06d}"
    with writing_aside(place) as aside:
        write(aside)
        manifest = Manifest(
            schema=SCHEMA,
            version=VERSION,
            batches_done=batches_done,
            steps_done=steps_done,
            tasks_sha256=tasks_sha256,
            start=start or {},
            files={name: _entry(aside / name) for name in _file_names(aside)},
        )
        (aside / "manifest.json").write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2))
    pointer = folder / POINTER
    with _writing(pointer):
        if pointer.is_symlink():  # `atomic_write` would replace what it leads to
            pointer.unlink()
        with atomic_write(pointer) as file:
            file.write(f"{place.name}\n")
    _remove_old(folder, batches_done, keep)
    return Checkpoint(place, manifest)


def save_model(model: PreTrainedModel, tokenizer: Any, folder: Path) -> None:
    """The policy's weights (of an adapted model the adapter alone) and its tokenizer, as Hugging Face writes them."""
    with quiet():
        if is_adapted(model):
            saver: Any = model
            # "auto" would look on the hub for whether the vocabulary has grown.
            saver.save_pretrained(folder, selected_adapters=[POLICY_ADAPTER], save_embedding_layers=False)
        else:
            model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextmanager
def writing_aside(place: Path) -> Iterator[Path]:
    """A hidden folder that takes the name `place`, whole and synced, when the block ends without an error.

    A folder of that name is replaced. Raises CheckpointError where the block or the disk fails.
    """
    aside = place.with_name(f".{place.name}.{os.getpid()}.tmp")
    replaced = place.with_name(f".{place.name}.{os.getpid()}.old.tmp")
    with _writing(place):
        try:
            _remove(aside)
            aside.mkdir(parents=True)
            yield aside
            # safetensors writes files that only their owner may read: a server of another user could not load them.
            readable = aside.stat().st_mode & 0o666
            for name in _file_names(aside):
                (aside / name).chmod(readable)
                _sync(aside / name)
            for parent, _, _ in os.walk(aside):
                _sync(Path(parent))
            if place.exists():
                place.rename(replaced)
            aside.rename(place)
            _sync(place.parent)
        finally:
            _remove(aside)
            if replaced.exists() and not place.exists():
                replaced.rename(place)
            _remove(replaced)


@contextmanager
def _writing(place: Path) -> Iterator[None]:
    try:
        yield
    # The writers of safetensors and torch each have errors of their own for a full disk.
    except (OSError, SafetensorError, RuntimeError) as error:
        raise CheckpointError(
            f"{place} cannot be written: {error}. What was saved before is still there; make room, or set right "
            "what it says, and start again"
        ) from error


def _remove_old(folder: Path, newest: int, keep: int) -> None:
    """Keep the `keep` newest up to `newest`; those with a higher number were found broken and trained past."""
    numbered = sorted(_numbered(folder), reverse=True)
    kept = [path for number, path in numbered if number <= newest][:keep]
    for _, path in numbered:
        if path not in kept:
            # Renamed first: a removal that is cut short leaves no half of a checkpoint under its name.
            hidden = path.with_name(f".{path.name}.{os.getpid()}.old.tmp")
            path.rename(hidden)
            _remove(hidden)
    for path in folder.iterdir():
        if _ASIDE.fullmatch(path.name):  # of a process that was killed
            _remove(path)


# ---------------------------------------------------------------- finding


def prepare(folder: Path) -> None:
    """Make the folder of a run's checkpoints. Raises CheckpointError where nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise CheckpointError(f"nothing can be written to {folder}: {error}. Set run_dir to another folder") from error
    if (folder / POINTER).is_dir():
        raise CheckpointError(f"{folder / POINTER} is a folder, where a run writes a file: remove it, or set run_dir")


def newest_checkpoint(folder: Path) -> tuple[Checkpoint | None, list[CheckpointError]]:
    """The newest whole checkpoint of a folder, and what is wrong with each newer one.

    None where there are no checkpoints. Raises CheckpointError where there are some and none is whole:
    a run must not start again from nothing because its checkpoints are broken.
    """
    faults: list[CheckpointError] = []
    for _, path in sorted(_numbered(folder), reverse=True):
        try:
            return open_checkpoint(path), faults
        except CheckpointError as error:
            faults.append(error)
    if faults:
        listed = "\n".join(str(fault) for fault in faults)
        raise CheckpointError(f"no checkpoint in {folder} is whole; remove them to start anew:\n{listed}")
    return None, []


def open_checkpoint(path: Path) -> Checkpoint:
    """A checkpoint, checked file by file. Raises CheckpointError that names the first file that is not as written."""
    try:
        manifest = msgspec.json.decode((path / "manifest.json").read_bytes(), type=Manifest)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is no checkpoint of mempo: it has no manifest.json") from error
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{path / 'manifest.json'} is cut or foreign: {error}") from error
    if (manifest.schema, manifest.version) != (SCHEMA, VERSION):
        raise CheckpointError(
            f"{path} is a {manifest.schema!r} of version {manifest.version}; this release reads {SCHEMA!r}, {VERSION}"
        )
    for name, entry in manifest.files.items():
        file = path / name
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise CheckpointError(f"{path / 'manifest.json'} is foreign: it names {name!r}, which is not in its folder")
        if not file.is_file():
            raise CheckpointError(f"{file} is missing")
        if (size := file.stat().st_size) != entry.bytes:
            raise CheckpointError(f"{file} has {size} bytes, not {entry.bytes}: it was cut or replaced")
        if _sha256(file) != entry.sha256:
            raise CheckpointError(f"{file} is not what was written: its SHA-256 differs from the manifest's")
    return Checkpoint(path, manifest)


def find_checkpoint(path: Path) -> tuple[Checkpoint, list[CheckpointError]]:
    """The checkpoint that a path means: one itself, or the newest whole one of a run."""
    if _NAME.fullmatch(path.name) or (path / "manifest.json").exists():
        return open_checkpoint(path), []
    found, faults = newest_checkpoint(path / "checkpoints" if (path / "checkpoints").is_dir() else path)
    if found is None:
        raise CheckpointError(f"there is no checkpoint in {path}: name a run's folder or one of its checkpoints")
    return found, faults


# ---------------------------------------------------------------- restoring


def restore(trainer: Trainer, checkpoint: Checkpoint, config: Config) -> None:
    """Put a trainer, fresh from the start of its run, into the state of a checkpoint.

    Raises CheckpointError where the checkpoint belongs to another run: other weights, tasks, or settings
    that decide which tasks come in which batch.
    """
    _check_same_run(checkpoint, config, trainer.tasks)
    load_weights(trainer.model, checkpoint)
    _check_same_start(checkpoint, config, trainer)
    with reading(checkpoint, "optimizer.pt") as file:
        state = torch.load(file, weights_only=True, map_location="cpu")
        trainer.go_on_from(
            state, batches_done=checkpoint.manifest.batches_done, steps_done=checkpoint.manifest.steps_done
        )
    with reading(checkpoint, "replay.jsonl") as file:
        trainer.replay.read(file)


@contextmanager
def reading(checkpoint: Checkpoint, name: str) -> Iterator[Path]:
    """The path of a file of a checkpoint; whatever its content makes go wrong inside names it, as a CheckpointError."""
    file = checkpoint.path / name
    if name not in checkpoint.manifest.files:
        raise CheckpointError(f"{checkpoint.path / 'manifest.json'} is foreign: it lists no {name}")
    try:
        yield file
    except MempoError:
        raise
    except Exception as error:  # torch, pickle, safetensors and json each have their own
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{file} is of another model, damaged or foreign: {reason}") from error


def load_weights(model: PreTrainedModel, checkpoint: Checkpoint) -> None:
    """Fill a model, or its adapter, from the safetensors that a checkpoint lists.

    Raises CheckpointError where a trained weight is missing, unknown or of another shape: nothing may
    keep its random values.
    """
    found: dict[str, torch.Tensor] = {}
    for path in checkpoint.model_files:
        if path.suffix == ".safetensors":
            with reading(checkpoint, f"model/{path.name}") as file:
                found |= load_file(file, device="cpu")
    state = model.state_dict()
    if is_adapted(model):
        found = {f"{name.removesuffix('.weight')}.{POLICY_ADAPTER}.weight": tensor for name, tensor in found.items()}
        trained = {name for name in state if f".{POLICY_ADAPTER}." in name}
    else:
        trained = {name for name, _ in model.named_parameters()}
    faults = {
        "missing": sorted(trained - found.keys()),
        "unknown": sorted(found.keys() - state.keys()),
        "of another shape": sorted(n for n in state.keys() & found.keys() if state[n].shape != found[n].shape),
    }
    if any(faults.values()):
        listed = "; ".join(
            f"{fault}: {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}"
            for fault, names in faults.items()
            if names
        )
        raise CheckpointError(f"the weights in {checkpoint.model_folder} are not those of this model ({listed})")
    with torch.no_grad():
        for name, tensor in found.items():
            state[name].copy_(tensor)


def _check_same_run(checkpoint: Checkpoint, config: Config, tasks: Sequence[Task]) -> None:
    saved, now = key_values(checkpoint.config), key_values(config)
    changed = [
        f"{key} was {saved[key]!r} and is {now[key]!r}"
        for key in now
        if any(key == own or key.startswith(f"{own}.") for own in SAME_RUN) and saved[key] != now[key]
    ]
    if not changed and checkpoint.manifest.tasks_sha256 != tasks_sha256(tasks):
        changed = ["the tasks are others"]
    if changed:
        raise CheckpointError(
            f"{checkpoint.path} belongs to another run: {'; '.join(changed)}. Set run_dir to a new folder"
        )


def _check_same_start(checkpoint: Checkpoint, config: Config, trainer: Trainer) -> None:
    """Weights that were replaced under the run: nothing else would tell, and the KL would be taken to them."""
    if config.model.path == TINY or (trainer.reference is None and not is_adapted(trainer.model)):
        return  # made from the seed; or all weights come from the checkpoint
    replaced = [key for key, sha256 in checkpoint.manifest.start.items() if trainer.start.get(key) != sha256]
    if replaced:
        raise CheckpointError(
            f"{checkpoint.path} belongs to a run that started from other weights than those that "
            f"{' and '.join(replaced)} now names: put the earlier ones back, or set run_dir to a new folder"
        )


def tasks_sha256(tasks: Sequence[Task]) -> str:
    """Of the ids in their order."""
    return hashlib.sha256(json.dumps([task.id for task in tasks]).encode()).hexdigest()


# ---------------------------------------------------------------- export


def export_checkpoint(checkpoint: Checkpoint, out: Path, *, replace: bool = False) -> None:
    """Write a plain Hugging Face folder, an adapter merged into its model, that transformers and vLLM load.

    Raises ConfigError where `out` holds anything but an earlier export, e.g. a model of the user's, unless
    `replace` says that it may go.
    """
    out = Path(os.path.realpath(out))  # a link stays a link, and `.` has a name
    if out.exists() and not replace and not _is_export(out):
        raise ConfigError(f"{out} exists and is no export of a model (it has no {EXPORT_MARK}); name another folder")
    adapted = (checkpoint.model_folder / "adapter_config.json").is_file()
    merged = _merged(checkpoint) if adapted else None
    with writing_aside(out) as aside:
        for file in checkpoint.model_files:
            if not (adapted and (file.name.startswith("adapter_") or file.name == "README.md")):
                shutil.copy2(file, aside / file.name)
        if merged is not None:
            with quiet():
                merged.save_pretrained(aside)
        done = {"checkpoint": checkpoint.path.name, "steps_done": checkpoint.manifest.steps_done}
        (aside / EXPORT_MARK).write_text(json.dumps(done), encoding="utf-8")


def _is_export(out: Path) -> bool:
    return out.is_dir() and (not any(out.iterdir()) or (out / EXPORT_MARK).is_file())


def _merged(checkpoint: Checkpoint) -> PreTrainedModel:
    """The base model with the checkpoint's adapter in its weights."""
    folder, own = str(checkpoint.model_folder), checkpoint.manifest.start.get("model.path")
    base = base_model(checkpoint.config, len(load_tokenizer(folder)))
    if own not in (None, start_sha256(base)["model.path"]):
        raise CheckpointError(
            f"{checkpoint.path} is an adapter of other weights than those that model.path = "
            f"{checkpoint.config.model.path!r} now names: put the earlier ones back"
        )
    adapted: Any = load_adapter(base, folder)
    return adapted.merge_and_unload()


# ---------------------------------------------------------------- files


def _numbered(folder: Path) -> list[tuple[int, Path]]:
    if not folder.is_dir():
        return []
    names = [(path, _NAME.fullmatch(path.name)) for path in folder.iterdir()]
    return [(int(match[1]), path) for path, match in names if match]


def _remove(path: Path) -> None:
    """A file, a link or a whole folder, where there is one."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def _file_names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def _entry(file: Path) -> FileEntry:
    return FileEntry(bytes=file.stat().st_size, sha256=_sha256(file))


def _sha256(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
