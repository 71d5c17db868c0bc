"""The protocol as transcripts for review: a change of behaviour changes these files."""

import importlib.util
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location("stories", Path(__file__).with_name("stories.py"))
assert _spec is not None
assert _spec.loader is not None
stories = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(stories)


@pytest.mark.parametrize("name", sorted(path.stem for path in stories.FOLDER.glob("*.txt")))
def test_the_machines_reproduce_the_transcript(name: str) -> None:
    transcript = (stories.FOLDER / f"{name}.txt").read_text()
    assert stories.Story().play(transcript) == transcript, "python tests/protocol/stories.py rewrites them"
