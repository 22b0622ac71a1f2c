from __future__ import annotations

from pathlib import Path

import pytest

from mempo.core import ConfigError
from mempo.policy.models import load_model, load_tokenizer


def test_a_folder_that_is_not_there_is_said_to_be_none_and_no_hub_is_asked(tmp_path: Path) -> None:
    for name in (str(tmp_path / "nothing"), "./nothing", "~/nothing"):
        with pytest.raises(ConfigError, match="there is no such folder"):
            load_model(name)
        with pytest.raises(ConfigError, match="there is no such folder"):
            load_tokenizer(name)


def test_a_model_without_its_tokenizer_is_said_to_lack_that_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 8}', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"the tokenizer of model.path .* there is no tokenizer.json in the folder"):
        load_tokenizer(str(tmp_path))


def test_a_folder_without_weights_is_told_in_the_librarys_words_and_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 8}', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"the model of model.path .* as a folder: .*Give a folder"):
        load_model(str(tmp_path))
