"""Commands, paths, names and links in the documents exist."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md")
    for path in ROOT.glob(pattern)
)
DECISIONS = sorted((ROOT / "docs/decisions").glob("*.md"))
NAMES = [str(path.relative_to(ROOT)) for path in DOCUMENTS]

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)
CODE = re.compile(r"`([^`\n]+)`")
OUR_PATH = re.compile(r"(embodied|dreamerv3|benchmarks|tests|docs|examples)/[\w./-]*")


def prose(path):
    """A document without its code blocks."""
    return FENCE.sub("", path.read_text())


def blocks(path, language):
    """The contents of a document's code blocks of one language."""
    return [body for kind, body in FENCE.findall(path.read_text()) if kind == language]


def code(path):
    """Everything in a document that is set as code, in the text or as a block."""
    return [
        *CODE.findall(prose(path)),
        *(body for _, body in FENCE.findall(path.read_text())),
    ]


def anchor(heading):
    """The name under which a heading can be linked to."""
    kept = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    return kept.replace(" ", "-")


def leads_somewhere(document, link):
    """Whether a relative link's file, and the heading in it, are in the project."""
    path, _, fragment = link.partition("#")
    target = (document.parent / path).resolve() if path else document
    if not target.is_relative_to(ROOT) or not target.exists():
        return False
    return not fragment or fragment in map(anchor, HEADING.findall(prose(target)))


def make_targets():
    return set(
        re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    )


def test_the_documents_that_a_project_has_are_there():
    assert {"README.md", "CONTRIBUTING.md", "CHANGELOG.md"} <= set(NAMES)
    assert {"docs/architecture.md", "docs/decisions/README.md"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_links_within_the_project_lead_somewhere(name):
    document = ROOT / name
    links = LINK.findall(prose(document))
    inner = [link for link in links if not re.match(r"https?://|mailto:", link)]
    broken = [link for link in inner if not leads_somewhere(document, link)]
    assert broken == []


@pytest.mark.parametrize("name", NAMES)
def test_files_and_modules_that_are_named_exist(name):
    missing = []
    for text in code(ROOT / name):
        if OUR_PATH.fullmatch(text) and not (ROOT / text).exists():
            missing.append(text)
        for module in re.findall(r"python -m ((?:benchmarks|dreamerv3)\.\w+)", text):
            path = ROOT / module.replace(".", "/")
            if not (
                path.with_suffix(".py").exists() or (path / "__main__.py").exists()
            ):
                missing.append(module)
    assert missing == []


def defined_names(path):
    """Every class, function, constant and `Class.method` of a module."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {x.id for x in targets if isinstance(x, ast.Name)}
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
            if isinstance(node, ast.ClassDef):
                inner = [x for x in node.body if isinstance(x, ast.FunctionDef)]
                found |= {f"{node.name}.{x.name}" for x in inner}
    return found


def named_places():
    """Yields the modules and names in them that the architecture page mentions."""
    text = prose(ROOT / "docs/architecture.md")
    for path, name in re.findall(r"`([\w/]+\.py):([\w.]+)`", text):
        yield (path if path.startswith("dreamerv3") else f"embodied/{path}"), name
    for line in text.splitlines():
        for names, path in re.findall(
            r"((?:`[\w.]+`(?:, | and | or )?)+) (?:in|of) `([\w/]+\.py)`", line
        ):
            for name in CODE.findall(names):
                if "." not in name or name[0].isupper():
                    yield path, name


@pytest.mark.parametrize(("path", "name"), sorted(set(named_places())))
def test_the_architecture_names_what_is_there(path, name):
    assert name in defined_names(ROOT / path)


@pytest.mark.parametrize("name", NAMES)
def test_make_commands_exist(name):
    commands = [
        target
        for text in code(ROOT / name)
        for target in re.findall(r"\bmake ([a-z-]+)", text)
    ]
    assert set(commands) <= make_targets()


def test_the_readme_leads_to_the_demo_and_the_tests():
    commands = "".join(blocks(ROOT / "README.md", "sh"))
    assert re.findall(r"^make ([a-z-]+)", commands, re.MULTILINE)[:2] == [
        "demo",
        "test",
    ]


def test_commands_are_written_for_the_activated_environment():
    for path in DOCUMENTS:
        assert not [
            text for text in code(path) if re.search(r"\.venv/bin/(?!activate)", text)
        ]
    for name in ("README.md", "docs/parallel.md"):
        assert "`. .venv/bin/activate`" in prose(ROOT / name)


def test_contributing_takes_three_commands():
    (commands,) = blocks(ROOT / "CONTRIBUTING.md", "sh")
    assert len(commands.splitlines()) == 3


def test_the_changelog_begins_with_this_version():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest
    assert newest[1] == version


def test_the_index_links_every_decision():
    linked = LINK.findall(prose(ROOT / "docs/decisions/README.md"))
    pages = [path.name for path in DECISIONS if path.name != "README.md"]
    assert pages
    assert sorted(set(linked) & set(pages)) == pages


@pytest.mark.parametrize(
    "path",
    [path for path in DECISIONS if path.name != "README.md"],
    ids=lambda p: p.stem,
)
def test_a_decision_has_question_measurement_and_choice(path):
    headings = HEADING.findall(prose(path))
    assert headings[1:4] == ["Question", "Measured", "Chosen"]
