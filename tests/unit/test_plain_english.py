"""Sources and documentation are in plain English.

gossipx once had a language of its own: relative clauses without a noun ("whose answers tell how long a model takes"),
old-fashioned phrases ("what it was to end with cannot be had"), "a peer" for "per peer". Newcomers had to translate it
before they could read the code. This check keeps its most frequent phrases from returning. It cannot tell good English
from bad: a sentence that passes may still need another word.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COUNTED = (
    "pulls?|pushes|retrievals?|exchanges|models?|gradients|buffers|MB|GB|[MG]B/s|bytes|bits|seconds|ms|images|processes|"
    "threads|files|figures|lines?|steps?|iterations?|requests?|messages|waves"
)
EACH = "peer|worker|host|shard|value|tensor|table|machine|process|server|link|step|second|pull|pair|batch|core|run"
PHRASES = {
    r"whoever": "name the subject: 'any peer that'",
    r"whom(?! the Software)": "'which peer', or name the receiver",
    r"who (ask|hold|want|give|take|read|send)(s|ed)?": "name the subject: 'the requester', 'the caller'",
    r"what (of|becomes of|comes of|came of|there is of)": "name the thing",
    r"(is|are|was|were) to be": "'must be', 'will be'",
    r"(can|cannot|can not) be had|to be had": "'is available', 'is not available'",
    r"it is none|(is|are|was)\s+none\s+of": "'is not one of', 'return None'",
    r"one['’]s own": "'its own', 'your own', 'custom'",
    r"(go|goes|going|went|gone) on": "'continue', 'resume'",
    rf"({COUNTED}) a ({EACH})": "'per'",
    r"so many": "'N', 'at most N', 'a number of'",
    r"there (is|are) (none|no such)": "'not found', 'missing'",
    r"(?<=\"\"\")(What|Whose|Who)(?! (to do|a policy starts))": "a noun phrase, or 'Return ...'",
}
"""What not to write, as regular expressions between word boundaries, and what to write."""
_SPACE = r"(?:[^\S\n]+|[^\S\n]*\n[^\S\n]*)"  # a phrase may continue on the next line, but not after an empty one
PATTERN = re.compile(
    "|".join(rf"(?P<p{number}>\b({phrase})\b)".replace(" ", _SPACE) for number, phrase in enumerate(PHRASES)),
    re.IGNORECASE,
)


READ = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "setup.cfg", ".ci/run")


def files() -> Iterator[Path]:
    """All that people read here, but for what is generated."""
    yield from (ROOT / name for name in READ)
    for folder in ("gossipx", "tests", "bin", "docs", "examples", "topologies"):
        for path in sorted((ROOT / folder).rglob("*")):
            is_made = {"_build", "__pycache__"} & {*path.parts}
            if path.is_file() and path.suffix in ("", ".py", ".md", ".toml") and not is_made:
                yield path


def found(path: Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    for match in PATTERN.finditer(text):
        number = next(number for number in range(len(PHRASES)) if match[f"p{number}"])
        line = text.count("\n", 0, match.start()) + 1
        phrase = " ".join(match[0].split())
        yield f"{path.relative_to(ROOT)}:{line}: '{phrase}': write {[*PHRASES.values()][number]}"


def test_sources_and_docs_are_in_plain_english() -> None:
    told = [line for path in files() if path != Path(__file__) for line in found(path)]
    assert not told, "\n".join(["", *told])


@pytest.mark.parametrize(
    "text",
    [  # each contains a phrase that the check must reject
        "tell whoever asks",
        "it is none\nof these",
        "pulls a peer",
        "it Goes on",
        "what of a server can be one's own",
        '"""What follows."""',
    ],
)
def test_the_check_sees_what_it_looks_for(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    (tmp_path / "x.md").write_text(text)
    assert list(found(tmp_path / "x.md"))
