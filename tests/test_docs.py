"""Pages of the documentation: links lead somewhere, and all of it stays short enough to be read."""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MANUAL = [ROOT / "README.md", *sorted(page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "adr")]
PAGES = [*MANUAL, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs" / "adr").glob("*.md"))]
MAX_WORDS = 25_000
MAX_SENTENCE_WORDS = 25
LINK = re.compile(r"\]\(([^)\s]+)\)")
GENERATED_LIST = re.compile(r"<!-- (\S+) -->.*?<!-- /\1 -->", re.DOTALL)
"""Lists of settings and metrics that the programs print into a page."""
BYTES_EXAMPLE = re.compile(r"^```hex\n.*?^```$", re.MULTILINE | re.DOTALL)
CODE_BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
PAGES_OF_OTHERS = {"docs/router/router.md"}
"""Pages of another project that a comment cites."""
SCRIPT_START = re.compile(r"(?:^(?:\$ )?|`)((?:scripts|benchmarks)/\S+) -", re.MULTILINE)
"""A script with its options, as a line of a command or in a sentence."""
NAMED_PAGE = re.compile(r"\bdocs/[\w./-]+\.(?:md|svg|png)\b")


def read_prose(page: Path) -> str:
    """Return the page without its code blocks."""
    return CODE_BLOCK.sub("", page.read_text())


@cache
def list_anchors(page: Path) -> set[str]:
    """Return the anchors of the page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", read_prose(page), re.MULTILINE)
    texts = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in texts}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in LINK.findall(read_prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link}: no such file"
        if anchor:
            assert anchor in list_anchors(target), f"{link}: the page has the headings {sorted(list_anchors(target))}"


def test_every_page_is_linked_from_another() -> None:
    linked = set()
    for page in MANUAL:
        for link in LINK.findall(read_prose(page)):
            linked.add((page.parent / link.partition("#")[0]).resolve())
    lonely = [str(page.relative_to(ROOT)) for page in MANUAL[1:] if page not in linked]
    listed_folders = {folder for folder in linked if folder.is_dir()}
    assert [page for page in lonely if (ROOT / page).parent not in listed_folders] == []


def test_every_page_that_the_programs_name_exists() -> None:
    """Help texts, error messages, docstrings and comments send readers to pages."""
    folders = ("engine", "router", "events", "prompts", "kernels", "fleet", "options", "simulation", "scripts",
               "benchmarks", "examples", "deploy", "tests")  # fmt: skip
    files = [file for folder in folders for file in (ROOT / folder).rglob("*") if file.is_file()]
    for file in files:
        if file.suffix in (".gz", ".pyc", ".so", ".png") or "golden" in file.parts:
            continue
        try:
            text = file.read_text()
        except UnicodeDecodeError:
            continue
        for name in NAMED_PAGE.findall(text):
            assert name in PAGES_OF_OTHERS or (ROOT / name).exists(), f"{file.relative_to(ROOT)} names {name}"


def test_every_script_that_a_page_starts_by_its_path_can_be_started_so() -> None:
    """A reader types `benchmarks/engine.py --rounds 3` as it stands there."""
    starts = {start for page in PAGES for start in SCRIPT_START.findall(page.read_text())}
    assert starts, "no page starts a script by its path"
    assert [start for start in sorted(starts) if not os.access(ROOT / start, os.X_OK)] == []


def list_sentences(page: Path) -> list[str]:
    """Return the sentences of paragraphs, list items and table cells. Links are their labels, and code is one word."""
    prose = GENERATED_LIST.sub("", read_prose(page))
    prose = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "code", prose))
    paragraphs = [text for text in re.split(r"\n\s*\n|\n(?=\* |\d+\. )|(?<!\\)\|", prose) if not text.startswith("#")]
    return [
        " ".join(sentence.split())
        for paragraph in paragraphs
        for sentence in re.split(r"(?<=[.;:?!])\**\s+", paragraph)
    ]


@pytest.mark.parametrize(
    "page",
    [page for page in MANUAL if page.parent.name != "measurements"],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_sentences_are_short(page: Path) -> None:
    long_sentences = [text for text in list_sentences(page) if len(re.findall(r"\S*\w\S*", text)) > MAX_SENTENCE_WORDS]
    assert long_sentences == []


def count_words(text: str) -> int:
    """Return the number of words: runs of characters with a letter or a digit, those of code and tables included."""
    return len(re.findall(r"\S*\w\S*", text))


def count_written_words(page: Path) -> int:
    """Return the number of words that somebody wrote: not those of generated lists and of examples in bytes."""
    return count_words(BYTES_EXAMPLE.sub("", GENERATED_LIST.sub("", page.read_text())))


def test_the_manual_has_at_most_25_000_written_words() -> None:
    assert sum(map(count_written_words, MANUAL)) <= MAX_WORDS


if __name__ == "__main__":
    for page in MANUAL:
        print(f"{count_written_words(page):6} {page.relative_to(ROOT)}")
    print(f"{sum(map(count_written_words, MANUAL)):6} written words")
    print(f"{sum(count_words(page.read_text()) for page in MANUAL):6} with generated lists and examples in bytes")
