"""The settings: from TOML, from the command line, and back to TOML."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gossipx.errors import UsageError
from gossipx.settings import scenario
from gossipx.settings.files import absolute, dump, load, resolve
from gossipx.settings.keys import Key
from gossipx.settings.modes import MODES, Mode
from gossipx.settings.sections import KEYS
from gossipx.specs import toml


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "run.toml"
    file.write_text(text, encoding="utf-8")
    return file


def refusal(tmp_path: Path, text: str) -> tuple[str, str]:
    """Return place and message of the refusal of a configuration, without the file's directory."""
    file = written(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        load(file)
    assert caught.value.exit_code == 2
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{file}:")
    line, _, rest = message.removeprefix(f"{file}:").partition(": ")
    return line, rest


@pytest.mark.parametrize(
    ("name", "given", "spelt", "held"),
    [
        ("hub", 0, "0", "0"),
        ("hub", "node-a", '"node-a"', "node-a"),
        ("servers", 0, "0", "0"),
        ("servers", [0, 1], "[0, 1]", "0,1"),
        ("servers", ["node-a", 2], '["node-a", 2]', "node-a,2"),
        ("servers", "0,1", '"0,1"', "0,1"),
        ("checkpoint_every", 500, "500", "500"),
        ("checkpoint_every", "500", '"500"', "500"),
        ("checkpoint_every", "60s", '"60s"', "60s"),
        ("checkpoint_every", 0, "0", "0"),
    ],
)
def test_peers_and_intervals_may_be_numbers_too(tmp_path: Path, name: str, given: Any, spelt: str, held: str) -> None:
    """Where a value has a type: in a script and in a file."""
    assert resolve({name: given}).values[name] == held
    config = resolve(load(written(tmp_path, f"[{KEYS[name].table}]\n{name} = {spelt}\n")))
    assert config.values[name] == held


@pytest.mark.parametrize(
    ("name", "given", "told"),
    [
        ("hub", True, "--hub is not a peer's name or number: True"),
        ("hub", "", "--hub is empty"),
        ("servers", {"a": 1}, "--servers is not peers' names or numbers: {'a': 1}"),
        ("servers", [0, 1.5], "--servers is not a peer's name or number: 1.5"),
        ("servers", [], "--servers is empty"),
        ("checkpoint_every", True, "--checkpoint-every is not text"),
        ("checkpoint_every", 1.5, "--checkpoint-every is not text"),
        ("checkpoint_every", "5m", "is not an interval"),
        ("checkpoint_every", -3, "is not an interval"),
    ],
)
def test_values_that_name_no_peers_and_no_interval_are_refused(name: str, given: Any, told: str) -> None:
    with pytest.raises(UsageError, match=re.escape(told)):
        resolve({name: given})


# --- loading and writing ------------------------------------------------------------------------------


EVERY_SETTING = Path(__file__).parents[1] / "golden" / "every_setting.toml"
"""Every setting of a run, with another value than its default."""


def test_the_example_has_every_setting_with_another_value_than_its_default() -> None:
    values = load(EVERY_SETTING)
    assert values.keys() == KEYS.keys()
    assert [name for name, value in values.items() if value == KEYS[name].default] == []


def of_mode(values: Mapping[str, Any], kind: type[Mode]) -> dict[str, Any]:
    """Return those settings that a run of this mode has."""
    others = {name for one in MODES for name in one.__dataclass_fields__} - kind.__dataclass_fields__.keys()
    selecting = dict([kind.chosen_by])
    return {
        name: selecting.get(name, value)
        for name, value in values.items()
        if name in selecting or name not in others | {"mode", "exchange"}
    }


@pytest.mark.parametrize("kind", MODES)
def test_every_key_is_loaded(tmp_path: Path, kind: type[Mode]) -> None:
    values = load(EVERY_SETTING)
    given = toml.loads(EVERY_SETTING.read_text(encoding="utf-8"), EVERY_SETTING)
    plain = {name: value for table in given.values() for name, value in table.items()}
    assert values == {**plain, "lr_steps": (0.5, 0.75)}
    wanted = of_mode(values, kind)
    config = resolve({**wanted, **({"weights": kind.weights_allowed[-1]} if "weights" in wanted else {})})
    assert isinstance(config.mode, kind)
    for name in wanted.keys() - {"weights"}:
        held = config.values[name]
        assert held == wanted[name] and type(held) is type(wanted[name]), name
    again = resolve(load(written(tmp_path, dump(config))))
    assert again == absolute(config)
    assert dump(again) == dump(config)


def test_text_that_toml_escapes_is_read_back(tmp_path: Path) -> None:
    config = resolve({"logdir": 'a "b"\\c # [run] ä', "lr_steps": []})
    assert resolve(load(written(tmp_path, dump(config)))) == absolute(config)
    assert config.task.lr_steps == ()


@pytest.mark.parametrize("key", [*KEYS.values(), *scenario.OWN.values(), *scenario.OF_FAULT.values()])
def test_the_docstring_below_a_setting_is_its_help(key: Key) -> None:
    assert key.help.endswith(".") and "\n" not in key.help


@pytest.mark.parametrize(
    ("spelt", "expected"),
    [
        ("[0.5, 0.75]", (0.5, 0.75)),
        ("[\n  0.5, # half\n  1,\n]", (0.5, 1.0)),
        ("[]", ()),
        ('"0.5,0.75"', (0.5, 0.75)),
        ('"0.5, 0.75,"', (0.5, 0.75)),
        ('""', ()),
    ],
)
def test_a_list_in_a_file_or_with_commas(tmp_path: Path, spelt: str, expected: tuple[float, ...]) -> None:
    held = resolve(load(written(tmp_path, f"[task]\nlr_steps = {spelt}"))).task.lr_steps
    assert held == expected and all(type(value) is float for value in held)
    if spelt[0] == '"':
        assert resolve({"lr_steps": spelt.strip('"')}).task.lr_steps == expected


# --- which value counts -------------------------------------------------------------------------------


def test_the_command_line_overrides_the_file_and_the_file_overrides_the_default(tmp_path: Path) -> None:
    """Also by a value that is the default, or false."""
    text = '[run]\nseed = 1\niterations = 5\n[sync]\npolicy = "tau:10"\nblocking = true\n[task]\nlr_steps=[0.1]'
    file = load(written(tmp_path, text))
    config = resolve(file, {"seed": 0, "iterations": None, "lr_steps": "0.9", "blocking": False})
    assert config.run.seed == KEYS["seed"].default == 0 and config.values["blocking"] is False
    assert config.run.iterations == 5
    assert config.decides == "tau:10"
    assert config.task.lr_steps == (0.9,)
    assert config.exchange.peer_timeout == KEYS["peer_timeout"].default


def test_a_preset_overrides_the_file_of_a_run(tmp_path: Path) -> None:
    """A run writes all of its settings, and which of them were given; options beside the preset take precedence."""
    (tmp_path / "config.toml").write_text(dump(resolve({"policy": "tau:20", "outer": "momentum:0.6", "seed": 3})))
    file = load(tmp_path / "config.toml")
    found = resolve(file, {"preset": "paper", "finish": "consensus"})
    values = [found.values[name] for name in ("policy", "blocking", "finish", "seed", "outer")]
    assert values == ["adaptive", True, "consensus", 3, "none"] and "policy" not in found.given
    (tmp_path / "config.toml").write_text(dump(found))
    again = resolve(load(tmp_path / "config.toml"), {"policy": "tau:5"})
    assert (again.decides, again.values["blocking"], again.sync.finish) == ("tau:5", True, "consensus")


# --- what is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line", "parts"),
    [
        # Unknown tables.
        ("[run]\nseed = 1\n\n[snyc]\npolicy = 'never'\n", "4", ["unknown table 'snyc'", "did you mean 'sync'?"]),
        ("[[run]]\nseed = 1\n", "1", ["'run'", "table"]),
        # Settings outside tables, unknown ones, and ones in the wrong table.
        ("# mine\nseed = 3\n[run]\n", "2", ["'seed'", "it belongs in [run]"]),
        ("# mine\n\nsede = 3\n", "3", ["'sede'", "did you mean 'seed'?"]),
        ("run = 3\n", "1", ["'run'", "table"]),
        ("[run]\nseed = 1\n[run.deeper]\nx = 1\n", "3", ["unknown setting 'deeper' in [run]"]),
        ("[run]\nname = 'a'\n# policy\npolicy = 'never'\n", "4", ["unknown setting 'policy' in [run]", "[sync]"]),
        ("[task]\nbase_lr = 0.1\n", "2", ["unknown setting 'base_lr' in [task]", "did you mean 'lr'?"]),
        # Wrong types.
        ("[run]\nseed = 'one'\n", "2", ["seed is not an integer: 'one'"]),
        ("[run]\nname = 5\n", "2", ["name is not text: 5"]),
        ("[run]\noverwrite = 1\n", "2", ["overwrite is not true or false: 1"]),
        ("[exchange]\npeer_timeout = 'long'\n", "2", ["peer_timeout is not a number: 'long'"]),
        (f"[exchange]\npeer_timeout = 1{'0' * 400}\n", "2", ["peer_timeout is not a number"]),
        ("[task]\nlr_steps = 0.5\n", "2", ["lr_steps is not a list of numbers: 0.5"]),
        ("[task]\nlr_steps = [0.5, 'x']\n", "2", ["lr_steps is not a number: 'x'"]),
        # Choices and least values.
        ("[sync]\nfinish = 'consenus'\n", "2", ["finish is 'consenus'", "consensus, none"]),
        ("[sync]\n'buffers' = ''\n", "2", ["buffers is ''", "mix, local"]),
        ("[run]\n\n  iterations = 0\n", "3", ["iterations is 0: at least 1"]),
        ("[exchange]\npeer_timeout = 0.05\n", "2", ["peer_timeout is 0.05: at least 0.1"]),
        ("[exchange]\npeer_timeout = nan\n", "2", ["peer_timeout is nan: at least 0.1"]),
        ("[task]\nlr = inf\n", "2", ["lr is inf: a finite number"]),
        ("[task]\nlr_steps = [0.5, 7]\n", "2", ["lr_steps is 7.0: at most 1"]),
        (f"# mine\n[run]\niterations = 1{'0' * 5000}\n", "3", ["a number has too many digits"]),
        (f"x = '{'0' * 5000}'\ny = [1,\n{'1_0' * 5000}]\n", "3", ["a number has too many digits"]),
        # The same word in another table or in a comment is not mistaken for it.
        ("[task]\ndata_dir = 'seed = -1'\n# seed = -1\n[ run ] # seed = -1\nseed = -1\n", "5", ["seed is -1"]),
        # A table written before the first header.
        ("# mine\n\nrun.seed = 'x'\n", "3", ["seed is not an integer"]),
        ("# mine\nrun.iterations = 3\nrun . seed = 'x'\n", "3", ["seed is not an integer"]),
        ("# mine\nrun = {iterations = 3, seed = 'x'}\n", "2", ["seed is not an integer"]),
        ("# mine\nsnyc.policy = 'never'\n", "2", ["unknown table 'snyc'"]),
        # Not TOML.
        ("[run]\nseed = \n", "2", ["not TOML"]),
        ("[run]\nname = 'a'\nlogdir = \"open", "3", ["not TOML"]),
    ],
)
def test_an_error_in_the_file_is_reported_with_its_line(tmp_path: Path, text: str, line: str, parts: list[str]) -> None:
    at, message = refusal(tmp_path, text)
    assert at == line, message
    for part in parts:
        assert part in message


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    reasons = {tmp_path / "none.toml": "No such file", tmp_path: "Is a directory", binary: "not UTF-8 text"}
    for path, reason in reasons.items():
        with pytest.raises(UsageError, match=reason) as caught:
            load(path)
        assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({"polcy": "never"}, ["unknown setting 'polcy'", "did you mean 'policy'?"]),
        ({"iterations": 0}, ["--iterations is 0: at least 1"]),
        ({"peer_timeout": "soon"}, ["--peer-timeout is not a number: 'soon'"]),
        ({"finish": "never"}, ["--finish is 'never': one of consensus, none"]),
        ({"blocking": "true"}, ["--blocking is not true or false"]),
    ],
)
def test_an_error_on_the_command_line_names_its_option(given: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        resolve({}, given)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("number", ["9" * 30, "9" * 330, "9" * 5000, "1e999"])
def test_no_setting_accepts_an_unreasonably_large_number(number: str) -> None:
    """Each peer would fail because of it, long after the command line was read."""
    numbers = [key for key in KEYS.values() if key.kind in (int, float)]
    assert len(numbers) > 15
    for key in numbers:
        with pytest.raises(UsageError, match=rf"^{key.option} ") as caught:
            resolve({key.name: number})
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        {"max_rate": "9" * 330 + "mbit"},
        {"policy": "adaptive:threshold=1e999"},
        {"policy": "tau:" + "9" * 5000},
        {"mixing": "average:beta=1e999"},
        {"schedule": "inner-outer:outer=1e999"},
        {"partition": "dirichlet:alpha=1e999"},
    ],
)
def test_a_spec_accepts_no_nan_or_infinity(given: dict[str, str]) -> None:
    with pytest.raises(UsageError) as caught:
        resolve(given)
    assert "\n" not in str(caught.value)


# --- no torch -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "module", ["gossipx", "gossipx.settings.files", "gossipx.cli", "gossipx.launch.hosts", "gossipx.server.placement"]
)
def test_importing_it_does_not_import_torch(module: str) -> None:
    program = f"import sys, {module}; print(sorted({{'torch', 'numpy', 'tensorboard'}} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"
