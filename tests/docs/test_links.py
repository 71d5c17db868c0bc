"""Links between the documents."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    file
    for pattern in ("*.md", "docs/**/*.md", "deploy/*.md", "examples/**/*.md")
    for file in ROOT.glob(pattern)
]


def test_every_linked_file_exists() -> None:
    assert len(DOCUMENTS) > 10
    links = {
        (file, link) for file in DOCUMENTS for link in re.findall(r"\]\(([^)\s#]+)[^)]*\)", file.read_text())
    }
    lost = [
        (str(file), link) for file, link in links if "://" not in link and not (file.parent / link).exists()
    ]
    assert lost == []
