"""The protocol as transcripts for review: a change of behaviour changes these files."""

import pytest

from tests.protocol import stories


@pytest.mark.parametrize("name", sorted(path.stem for path in stories.FOLDER.glob("*.txt")))
def test_the_machines_reproduce_the_transcript(name: str) -> None:
    transcript = (stories.FOLDER / f"{name}.txt").read_text()
    assert stories.Story().play(transcript) == transcript, "python -m tests.protocol.stories rewrites them"
