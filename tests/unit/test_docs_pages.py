"""The documentation: it names every option, and tests run every example that it shows."""

from __future__ import annotations

import configparser
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from pages import HOUSE, LANGUAGES, PAGES, examples

from gossipx import policies
from gossipx.cli import main
from gossipx.server.placement import BUILT_IN
from gossipx.server.sync_models import SYNC_MODELS
from gossipx.settings.keys import Key
from gossipx.settings.sections import KEYS

DOCS = HOUSE / "docs"
REPOSITORY = "https://github.com/gossipx/gossipx"
# The pages that document each section of settings.
SECTIONS = {"hub": ["hub.md"], "server": ["server.md"]}


def text_of(names: list[str]) -> str:
    """Return the text of these pages."""
    return "".join((DOCS / name).read_text(encoding="utf-8") for name in names)


@pytest.mark.parametrize("key", [key for key in KEYS.values() if key.table in SECTIONS], ids=lambda key: key.name)
def test_every_option_is_named_on_its_page(key: Key) -> None:
    """The option or its opposite, and each of its choices; --servers-only does not count as --servers."""
    text = text_of(SECTIONS[key.table])
    assert re.search(rf"--(no-)?{key.option.removeprefix('--')}(?![\w-])", text)
    for word in key.choices:
        assert re.search(rf"[`( ]{word}[`)]", text), word


@pytest.mark.parametrize("name", SYNC_MODELS)
def test_every_sync_model_is_named_with_all_of_its_keys(name: str) -> None:
    text = text_of(SECTIONS["server"])
    assert f"`{name}" in text
    specs = "".join(re.findall(rf"`{name}(?::[^`]*)?`", text))
    for key in inspect.signature(SYNC_MODELS[name]).parameters:
        assert f"{key}=" in specs or f"`{key}=" in text, key


@pytest.mark.parametrize(
    ("page", "name"), [("server.md", name) for name in BUILT_IN] + [("policies.md", name) for name in policies.BUILT_IN]
)
def test_every_spec_has_its_row(page: str, name: str) -> None:
    rows = re.findall(r"^\| `.*?\|", text_of([page]), re.MULTILINE)
    assert any(re.search(rf"`{name}[`:]", row) for row in rows)


def test_the_architecture_page_has_the_packages_of_the_import_contract() -> None:
    contract = configparser.ConfigParser()
    contract.read(HOUSE / "setup.cfg", encoding="utf-8")
    layers = contract["importlinter:contract:house"]["layers"].replace("gossipx.", "").strip().split("\n")
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", text_of(["architecture.md"]), re.MULTILINE)
    assert [re.findall(r"\w+", row) for row in rows] == [re.findall(r"\w+", layer) for layer in layers]


# --- examples ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_nothing_that_looks_like_a_command_escapes_the_tests(page: Path) -> None:
    """tests/e2e/test_docs.py runs bash and Python; the output of a command is text."""
    for one in examples(page):
        known = one.language in LANGUAGES or re.match(r"\{[\w-]+\}", one.language)
        assert known, f"{one.place}: the language of a fence is one of {', '.join(LANGUAGES)}, not '{one.language}'"
        assert one.reason is None or len(one.reason) > 10, f"{one.place}: give the reason why it is not run"
        commands = [line for line in one.text.split("\n") if re.match(r"\s*(\$ |gossipx \w|python )", line)]
        assert one.language != "text" or not commands, f"{one.place}: a text fence has the command {commands[0]!r}"
        assert one.language != "toml" or one.file, f"{one.place}: the first line of a TOML fence must be '# NAME.toml'"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_line_of_prose_is_taken_for_a_comment(page: Path) -> None:
    """MyST silently leaves out a line that begins with a percent sign."""
    prose = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert not re.findall(r"^\s*%.*$", prose, re.MULTILINE)


def options(command: click.Command) -> Iterator[str]:
    for parameter in command.params:
        yield from (*parameter.opts, *parameter.secondary_opts)
    for each in getattr(command, "commands", {}).values():
        yield from options(each)


# Options of bin/bench, bin/test and other programs.
OTHERS = {"--all", "--full", "--json", "--keep", "--logdir", "--only", "--rate", "--seeds"}
OTHERS |= {"--period", "--steps", "--systems", "--lowest", "--python", "--quick", "--smoke"}
OTHERS |= {"--build-arg", "--strict", "--rm"}  # those of twine and docker
OTHERS |= {"--nproc-per-node", "--standalone", "--no-python", "--max-restarts", "--rdzv-backend"}  # torchrun's
OTHERS |= {"--ntasks", "--kill-on-bad-exit", "--from-literal", "--mca", "--env"}  # srun's, kubectl's, mpirun's, flux's


def test_the_page_of_the_command_line_has_every_command() -> None:
    page = (DOCS / "command-line.md").read_text(encoding="utf-8")
    assert isinstance(main, click.Group)
    assert {name for name in main.commands if f"| `gossipx {name}` |" not in page} == set()


@pytest.mark.parametrize("name", ["simulate", "doctor", "status", "compare"])
def test_a_command_that_shares_settings_names_its_own_options_only(name: str) -> None:
    """The iterations of gossipx simulate told of --seconds, which a scenario's command does not have."""
    assert isinstance(main, click.Group)
    command = main.commands[name]
    texts = [one.help or "" for one in command.params if isinstance(one, click.Option)]
    assert set(re.findall(r"--[a-z][\w-]+", " ".join(texts))) <= {*options(command)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_option_that_is_named_is_there(page: Path) -> None:
    there = {*options(main), "--help", *OTHERS}
    spans = re.findall(r"`+([^`]+)`+", re.sub(r"\s*\n\s*", " ", page.read_text(encoding="utf-8")))
    named = {option for span in spans for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", span)}
    assert named <= there, f"{page.name}: {named - there}"


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent == HOUSE], ids=lambda page: page.stem)
def test_every_link_leads_somewhere(page: Path) -> None:
    """Pages of the repository root; Sphinx checks those of docs/. Links to the repository lead to files here."""
    text = page.read_text(encoding="utf-8")
    targets = dict(re.findall(r"^\[([^\]]+)\]: (\S+)$", text, re.MULTILINE))
    links = re.findall(r"\]\(([^)]+)\)", text)
    links += [targets.get(label, label) for label in re.findall(r"\]\[(.+?)\]", text)]
    assert links and set(targets.values()) <= set(links)
    for link in links:
        path, _, anchor = re.sub(rf"^{REPOSITORY}/(blob|raw)/main/", "", link).partition("#")
        if not path.startswith("https://"):
            assert (HOUSE / path).exists(), link
            assert not anchor or anchor in headings(HOUSE / path), link


def headings(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    found = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in found}


def test_links_of_the_readme_work_on_a_package_index() -> None:
    """It is the long description of the package, beside which there are no other files."""
    text = (HOUSE / "README.md").read_text(encoding="utf-8")
    labels = re.findall(r"^\[([^\]]+)\]: https://", text, re.MULTILINE)
    assert set(re.findall(r"\]\[(.+?)\]", text)) == set(labels)
    assert not [link for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith("https://")]


# --- reading a page --------------------------------------------------------------------------------------------


def page_of(tmp_path: Path, text: str) -> Path:
    page = tmp_path / "page.md"
    page.write_text(text, encoding="utf-8")
    return page


def test_examples_are_read_in_order_with_what_is_run_first_and_what_is_not(tmp_path: Path) -> None:
    text = (
        "<!-- run first: touch one -->\n```bash\nls one\n```\n\n- a point\n\n"
        "  ```python\n  # named.py\n  if 1:\n      x\n  ```\n\n"
        "<!-- not run: it has no end -->\n```bash\nyes\n```\n"
        "<!-- run first:\ntouch two\ntouch three\n-->\n```text\nsaid\n```\n"
    )
    read = [(one.line, one.language, one.text, one.reason, one.file) for one in examples(page_of(tmp_path, text))]
    assert read == [
        (1, "bash", "touch one", None, None),
        (2, "bash", "ls one\n", None, None),
        (8, "python", "# named.py\nif 1:\n    x\n", None, "named.py"),
        (15, "bash", "yes\n", "it has no end", None),
        (18, "bash", "touch two\ntouch three", None, None),
        (22, "text", "said\n", None, None),
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("```bash\nls\n", "page.md:1: a fence that is not closed"),
        ("<!-- run first: ls\n", "page.md:1: a comment that is not closed"),
        ("<!-- not run: for no reason -->\n\n```bash\nls\n```\n", "page.md:1: 'not run' stands on the line before"),
    ],
)
def test_a_page_that_cannot_be_read_says_where(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        examples(page_of(tmp_path, text))
