"""Configs are read from TOML, presets and overrides, and each mistake is named."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tomllib
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest

from mempo.config import (
    AdvantageConfig,
    Config,
    EvalConfig,
    ReplayConfig,
    RolloutConfig,
    TrainConfig,
    check,
    given,
    key_values,
    load_config,
    presets,
    require_inputs,
)
from mempo.core import ConfigError


def write(folder: Path, text: str, name: str = "run.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_every_toml_of_the_repository_loads(repository: Path) -> None:
    found = [*repository.glob("configs/**/*.toml"), *repository.glob("src/mempo/config/presets/*.toml")]
    assert {path.stem for path in found} >= set(presets())
    for path in found:
        config = load_config(path)
        assert given(config)  # a file that gives nothing is a file that was not read


def test_the_defaults_are_the_papers_method() -> None:
    paper, default = load_config("paper"), Config()
    for section in ("context", "rollout", "reward", "memory", "advantage", "loss"):
        assert getattr(paper, section) == getattr(default, section)
    assert (paper.train.batch_tasks, paper.tasks.objectives, paper.optimizer.learning_rate) == (128, 2, 1e-6)


def test_overrides_win_over_the_file_which_wins_over_its_preset_which_wins_over_defaults(tmp_path: Path) -> None:
    path = write(tmp_path, 'preset = "tiny"\nseed = 5\n[rollout]\ngroup_size = 8\nmax_turns = 7\n')
    config = load_config(path, ["--rollout.max-turns", "9"])
    assert config.rollout.max_turns == 9  # override; the file says 7, the preset 6, the default is 16
    assert config.rollout.group_size == 8  # file; the preset says 4
    assert config.rollout.max_prompt_tokens == 384  # preset; the default is 4096
    assert config.rollout.top_p == 1.0  # default
    origin = given(config)
    assert origin["rollout.max_turns"] == "command line"
    assert origin["rollout.group_size"] == origin["seed"] == "run.toml"
    assert origin["rollout.max_prompt_tokens"] == "preset tiny"
    assert "rollout.top_p" not in origin


def test_a_key_given_with_its_default_value_counts_as_given(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, "seed = 0"), ["--advantage.alpha", "1.0"])
    assert config == Config()
    assert given(config) == {"seed": "run.toml", "advantage.alpha": "command line"}


def test_what_was_given_survives_pickling_and_a_config_made_in_code_has_its_own() -> None:
    config = load_config("tiny", ["--seed", "3"])
    assert given(pickle.loads(pickle.dumps(config))) == given(config)
    made = replace(Config(), advantage=AdvantageConfig(alpha=0.3))
    assert given(made) == {"advantage.alpha": "code"}


def test_overrides_read_every_kind_of_value() -> None:
    words = ["--advantage.gates", "mixed_groups", "skip_first_turn", "--log.progress", "False", "--loss.kl-beta=0"]
    words += ["--memory.baseline", "none", "--rollout.max_model_tokens", "8192", "--model.path", "a b"]
    config = load_config("paper", words)
    assert config.advantage.gates == ("mixed_groups", "skip_first_turn")
    assert config.log.progress is False
    assert config.loss.kl_beta == 0.0
    assert (config.memory.baseline, config.rollout.max_model_tokens, config.model.path) == ("none", 8192, "a b")
    assert load_config("tiny", ["--rollout.max-model-tokens", "None"]).rollout.max_model_tokens is None


def test_a_section_keeps_its_own_defaults_where_a_file_gives_some_of_its_keys(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, "[sft.optimizer]\nwarmup_steps = 3\n[eval.retriever]\ntop_k = 5\n"))
    # sft.optimizer has another learning rate than optimizer, and eval.retriever another address than retriever.
    assert (config.sft.optimizer.warmup_steps, config.sft.optimizer.learning_rate) == (3, 1e-5)
    assert (config.eval.retriever.top_k, config.eval.retriever.url) == (5, "http://127.0.0.1:8001")


def test_configs_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        Config().seed = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            "[advantage]\nalhpa = 1",
            ["advantage.alhpa", "run.toml", "did you mean advantage.alpha?", "std_floor, gates"],
        ),
        ("[loss]\nstd_floor = 1", ["loss.std_floor", "did you mean advantage.std_floor?", "clip_low"]),
        (
            "[advantag]\nalpha = 1",
            ["unknown key advantag ", "did you mean advantage?", "the top level: run_dir, seed, model"],
        ),
        ("[model.lora]\nrnk = 4", ["model.lora.rnk", "did you mean model.lora.rank?", "[model.lora]: rank, alpha"]),
        ("advantage = 3", ["advantage = 3", "expected a table"]),
        ('[rollout]\ngroup_size = "16"', ["rollout.group_size", '"16"', "run.toml", "a whole number, at least 1"]),
        ("[rollout]\ngroup_size = true", ["rollout.group_size = true", "a whole number"]),
        ("[rollout]\ngroup_size = 2.5", ["rollout.group_size = 2.5", "a whole number"]),
        ("[log]\nprogress = 1", ["log.progress = 1", "true or false"]),
        ('[memory]\nbaseline = "prefx"', ["memory.baseline", '"prefx"', '"prefix", "visible", "previous_memory"']),
        ('[advantage]\ngates = ["mixed"]', ["advantage.gates", "a list, each item one of", '"mixed_groups"']),
        ('[tasks]\nfiles = "x.jsonl"', ["tasks.files", '"x.jsonl"', "a list, each item a string"]),
        ("[advantage]\nstd_floor = 0", ["advantage.std_floor = 0", "a number, above 0"]),
        ("[advantage]\nstd_floor = nan", ["advantage.std_floor = nan", "a number, above 0"]),
        ("[advantage]\nalpha = 2024-01-01", ["advantage.alpha", "2024-01-01", "a number"]),
        ('preset = "papr"', ["preset = 'papr'", "run.toml", "paper, tiny"]),
        ("seed = 1\nseed 2", ["run.toml is not TOML", "line 2"]),
        (f"seed = {'9' * 5000}", ["run.toml is not TOML", "4300 digits"]),
    ],
)
def test_a_mistake_in_a_file_names_key_value_file_and_what_is_known(
    tmp_path: Path, text: str, parts: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, text))
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--advantage.alhpa", "1"], ["advantage.alhpa (command line)", "did you mean advantage.alpha?"]),
        (["--alpha", "1"], ["did you mean model.lora.alpha or advantage.alpha?"]),
        (["--advantage.alpha", "x"], ["advantage.alpha", "'x'", "command line", "a number, at least 0"]),
        (["--advantage.alpha", "-1"], ["advantage.alpha = -1.0 (command line)", "a number, at least 0"]),
        (["--memory.baseline", "x"], ["'x'", "previous_memory", "command line"]),
        (["--rollout.max-model-tokens", "x"], ["rollout.max_model_tokens expects a whole number, at least 1"]),
        (["--seed"], ["--seed", "Missing value"]),
        (["stray"], ["stray", "command line"]),
    ],
)
def test_a_mistake_on_the_command_line_names_key_value_and_what_is_expected(words: list[str], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("paper", words)
    for part in parts:
        assert part in str(caught.value)
    assert "─" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_help_among_overrides_prints_every_key_and_leaves(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        load_config("paper", ["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for key in key_values(Config()):
        assert f"--{key.replace('_', '-')}" in text


def test_case_58_prompt_and_response_must_fit_the_model_and_the_message_has_the_three_numbers(tmp_path: Path) -> None:
    text = "[rollout]\nmax_prompt_tokens = 4096\nmax_response_tokens = 4096\nmax_model_tokens = 6000\n"
    with pytest.raises(ConfigError, match=r"rollout.max_model_tokens = 6000 .*4096 \+ 4096 = 8192"):
        load_config(write(tmp_path, text))
    # Exactly enough is enough: 4096 + 4096 = 8192.
    assert load_config(write(tmp_path, text.replace("6000", "8192"))).rollout.max_model_tokens == 8192


@pytest.mark.parametrize(
    "text",
    [
        '[model]\ndtype = "float32"\n[optimizer]\nautocast_bfloat16 = true\n[loss]\nold_logprobs = "recomputed"',
        '[model]\ndtype = "bfloat16"\n[optimizer]\nautocast_bfloat16 = true',  # the sampler rounds as well
        '[model]\ndtype = "float32"\n[sft.optimizer]\nautocast_bfloat16 = true',  # cloning has no sampler
    ],
)
def test_autocast_goes_with_log_probs_that_are_rounded_alike(tmp_path: Path, text: str) -> None:
    load_config(write(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[rollout]\ngroup_size = 1", ["rollout.group_size = 1 (run.toml)", "at least 2"]),
        ("[rollout]\ntemperature = 0", ["rollout.temperature = 0.0", "above 0"]),
        ("[rollout]\nmax_observation_tokens = 4096", ["rollout.max_observation_tokens = 4096", "(4096)"]),
        ("[rollout]\nmin_response_tokens = 2000", ["rollout.min_response_tokens = 2000", "(1024)"]),
        (
            '[replay]\nbatches = 2\n[loss]\nold_logprobs = "recomputed"',
            ["replay.batches = 2", 'loss.old_logprobs is "recomputed"', '"sampler"'],
        ),
        (
            '[model]\ndtype = "float32"\n[optimizer]\nautocast_bfloat16 = true',
            ["optimizer.autocast_bfloat16", 'set loss.old_logprobs to "recomputed"'],
        ),
        (
            '[model]\ndtype = "float32"\n[optimizer]\nautocast_bfloat16 = true\n[replay]\nbatches = 2',
            ["optimizer.autocast_bfloat16", '"recomputed", and replay.batches to 0'],
        ),
        ("[train]\nmini_batches = 129", ["train.mini_batches = 129", "batch_tasks (128)"]),
        ("[eval]\nevery_batches = 5", ["eval.every_batches = 5", "held-out tasks"]),
        (
            '[memory]\nrequire_format = true\nvalue = "log_probability"',
            ["memory.require_format", 'needs value = "probability"'],
        ),
        ('[advantage]\ngates = ["mixed_groups", "mixed_groups"]', ["advantage.gates", "twice"]),
        ("[model.tiny]\nwidth = 81", ["model.tiny.width = 81", "heads (5)"]),
        ('[model.lora]\nadapter = "a"', ["model.lora.adapter", "model.lora.rank"]),
    ],
)
def test_values_that_contradict_each_other_are_refused(tmp_path: Path, text: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, text))
    for part in parts:
        assert part in str(caught.value)


def test_all_contradictions_are_listed_at_once() -> None:
    config = Config(rollout=RolloutConfig(group_size=1, min_response_tokens=5000), train=TrainConfig(mini_batches=500))
    with pytest.raises(ConfigError) as caught:
        check(config)
    keys = [line.split(" = ")[0] for line in str(caught.value).splitlines()]
    assert sorted(keys) == ["rollout.group_size", "rollout.min_response_tokens", "train.mini_batches"]


def test_check_refuses_wrong_types_and_ranges_of_a_config_made_in_code() -> None:
    with pytest.raises(ConfigError, match=r"advantage.std_floor = -1.0 \(code\): expected a number, above 0"):
        check(Config(advantage=AdvantageConfig(std_floor=-1.0)))
    with pytest.raises(ConfigError, match=r"replay.share = 1.5"):
        check(Config(replay=ReplayConfig(share=1.5)))
    check(Config(eval=EvalConfig(files=("x",), every_batches=2)))


def test_case_78_paths_of_a_file_start_at_its_folder_whatever_the_working_directory_and_without_home(
    tmp_path: Path,
) -> None:
    folder, elsewhere = tmp_path / "my configs", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    write(folder, '[tasks]\nfiles = ["data dir/../train set.jsonl"]\n[model]\npath = "./model"\n')
    program = "import sys; from mempo.config import load_config; c = load_config(sys.argv[1]);"
    program += "print(c.tasks.files[0]); print(c.model.path)"
    environment = {key: value for key, value in os.environ.items() if key != "HOME"}
    ran = subprocess.run(
        [sys.executable, "-c", program, os.path.join("..", "my configs", "run.toml")],
        cwd=elsewhere,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    tasks, model = ran.stdout.splitlines()
    assert os.path.samefile(Path(tasks).parent, folder)
    assert Path(tasks).name == "train set.jsonl"
    assert Path(model).name == "model"
    assert os.path.samefile(Path(model).parent, folder)


def test_case_78_a_missing_input_is_named_with_its_path_and_how_to_make_it(tmp_path: Path) -> None:
    text = '[tasks]\nfiles = ["there.jsonl", "not there.jsonl"]\n'
    text += '[model]\npath = "../no model"\n[sft]\nfiles = ["t.jsonl"]\n'
    config = load_config(write(tmp_path, text))
    (tmp_path / "there.jsonl").touch()
    with pytest.raises(ConfigError) as caught:
        require_inputs(config)
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    by_key = {line.split(":")[0]: line for line in lines}
    assert str(tmp_path / "not there.jsonl") in by_key["tasks.files"]
    assert "mempo data compose" in by_key["tasks.files"]
    assert str(tmp_path.parent / "no model") in by_key["model.path"]
    assert "`mempo data teach` or `mempo sft-data`" in by_key["sft.files"]
    with pytest.raises(ConfigError, match=r"^model\.path: [^\n]*$"):
        require_inputs(config, unread=("tasks.files", "sft.files"))


def test_names_of_models_are_not_taken_for_paths(tmp_path: Path) -> None:
    for name in ("bundled:smollm2", "Qwen/Qwen2.5-7B", "tiny"):
        config = load_config(write(tmp_path, f'[model]\npath = "{name}"\n'))
        assert config.model.path == name
        require_inputs(config)


def test_paths_on_the_command_line_start_at_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config("paper", ["--tasks.files", "a.jsonl", "--run-dir", "out"])
    assert config.tasks.files == (str(tmp_path / "a.jsonl"),)
    assert config.run_dir == "out"  # written, not read: relative to where the run starts


def test_a_missing_config_file_is_named_with_its_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_config("no such.toml")
    assert str(tmp_path / "no such.toml") in str(caught.value)
    assert "mempo config show" in str(caught.value)


def test_an_unknown_preset_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'papr'.*paper, tiny"):
        load_config("papr")


def test_a_file_that_is_not_utf8_is_refused_and_a_byte_order_mark_is_not(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b'run_dir = "\xff"')
    with pytest.raises(ConfigError, match="not UTF-8 at byte 11"):
        load_config(path)
    path.write_bytes(b"\xef\xbb\xbfseed = 4")
    assert load_config(path).seed == 4


def test_a_preset_is_one_file_and_no_code(repository: Path) -> None:
    folder = repository / "src/mempo/config/presets"
    assert presets() == tuple(sorted(path.stem for path in folder.glob("*.toml")))
    for path in folder.glob("*.toml"):
        tomllib.loads(path.read_text(encoding="utf-8"))


def test_another_root_class_is_read_by_the_same_rules(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, "alpha = 2"), ["--std-floor", "0.5"], AdvantageConfig)
    assert (config.alpha, config.std_floor) == (2.0, 0.5)


def test_reading_a_config_imports_nothing_heavy() -> None:
    program = "import sys, mempo.config as c; c.load_config('paper', ['--seed', '1'])"
    program += "; print({m.split('.')[0] for m in sys.modules} & {'torch', 'numpy', 'transformers', 'httpx', 'rich'})"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("key", "choices"),
    [
        ("memory.baseline", ["prefix", "visible", "previous_memory", "no_memory", "none"]),
        ("memory.value", ["probability", "log_probability"]),
        ("memory.gold", ["joined", "per_objective"]),
        ("memory.aliases", ["first", "best"]),
        ("memory.scorer", ["current", "reference"]),
        ("advantage.statistics", ["group", "turn_index"]),
        ("advantage.normaliser", ["std", "mean", "none"]),
        ("advantage.gates", ["mixed_groups", "right_trajectories", "skip_first_turn"]),
        ("reward.correctness", ["exact", "mean_em", "mean_f1"]),
        ("context.thoughts", ["True", "False"]),
        ("context.policy", ["previous_turn", "last_turns", "full_history", "truncated_history", "memory_only"]),
        ("loss.kl", ["k3", "k1", "k2"]),
        ("loss.aggregation", ["trajectory_mean", "token_mean", "turn_mean"]),
        ("loss.truncated", ["keep", "exclude"]),
    ],
)
def test_each_option_of_the_method_has_a_name_and_the_first_is_the_default_unless_none_is(
    key: str, choices: list[str]
) -> None:
    default = key_values(Config())[key]
    assert default in ((), choices[0], choices[0] == "True")
    for choice in choices:
        value = key_values(load_config("paper", [f"--{key}", choice]))[key]
        assert value in (choice, (choice,), choice == "True")


@pytest.mark.parametrize("value", ["inf", "-inf", "nan"])
def test_numbers_that_are_not_finite_are_refused_in_a_file_and_on_the_command_line(tmp_path: Path, value: str) -> None:
    path = write(tmp_path, f"[optimizer]\nlearning_rate = {value}\n")
    with pytest.raises(ConfigError, match=rf"optimizer.learning_rate = {value} \(run.toml\): expected a number"):
        load_config(path)
    with pytest.raises(ConfigError, match=rf"advantage.alpha = {value} \(command line\): expected a number"):
        load_config("paper", [f"--advantage.alpha={value}"])


def test_a_nul_is_refused_wherever_a_text_may_stand(tmp_path: Path) -> None:
    for line in ('run_dir = "a\\u0000b"', 'tasks.files = ["a.jsonl", "b\\u0000"]'):
        with pytest.raises(ConfigError, match=r"\(run\.toml\): expected a .*, without the character NUL"):
            load_config(write(tmp_path, line + "\n"))


def test_a_tiny_model_that_no_machine_could_hold_is_refused_before_it_is_made() -> None:
    with pytest.raises(ConfigError, match=r"model\.tiny\.width = 5000000 .*at most 4096"):
        load_config("tiny", ["--model.tiny.width", "5000000"])


def test_brackets_without_end_are_no_toml(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.toml is not TOML"):
        load_config(write(tmp_path, "seed = " + "[" * 20_000 + "]" * 20_000))


@pytest.mark.parametrize("value", ["", " ", "~/runs", "~"])
def test_a_run_dir_names_a_folder_and_nobody_s_home_is_made_here(value: str) -> None:
    with pytest.raises(ConfigError, match=r"run_dir = .* \(command line\) must name a folder"):
        load_config("tiny", ["--run-dir", value])


def test_a_message_repeats_the_beginning_of_a_long_value_only() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("tiny", ["--train.batch-tasks", "a" * 100_000])
    assert len(str(caught.value)) < 1000
