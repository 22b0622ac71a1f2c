from __future__ import annotations

from pathlib import Path

import pytest
from tests.fixtures.toy import toy_policy

from mempo.core import ConfigError
from mempo.policy.models import load_model, load_tokenizer
from mempo.train.checkpoint import save_model


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


def load_both(folder: Path) -> None:
    load_tokenizer(str(folder))
    load_model(str(folder))


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("model.safetensors", ""),
        ("model.safetensors", "x" * 100),
        ("config.json", "[]"),
        ("config.json", '{"model_type": "llama", "hidden_size": 80, "num_attention_heads": 7}'),
        ("config.json", '{"model_type": "llama", "hidden_size": 32, "vocab_size": 15}'),
        ("tokenizer.json", "[]"),
        ("tokenizer.json", '{"version": "1.0'),
        ("tokenizer_config.json", "{"),
    ],
)
def test_a_damaged_file_of_a_model_is_an_error_that_names_the_folder_and_a_remedy(
    tmp_path: Path, file: str, content: str
) -> None:
    policy = toy_policy()
    save_model(policy.model, policy.renderer.tokenizer, tmp_path)
    (tmp_path / file).write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"of model\.path '.*' cannot be loaded as a folder: .+ Give a folder with"):
        load_both(tmp_path)
