"""Links between the documents: files and headings exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATTERNS = ("*.md", "docs/**/*.md", "deploy/*.md", "examples/**/*.md")
DOCUMENTS = [file for pattern in PATTERNS for file in ROOT.glob(pattern)]


def anchors(file: Path) -> set[str]:
    """Anchors of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_linked_file_and_heading_exists() -> None:
    assert len(DOCUMENTS) > 10
    lost = []
    for file in DOCUMENTS:
        for name, anchor in re.findall(r"\]\((?!\w+:)([^)\s#]*)#?([^)\s]*)\)", file.read_text()):
            target = file.parent / name if name else file
            if not target.exists() or (anchor and anchor not in anchors(target)):
                lost.append((str(file), name, anchor))
    assert lost == []
