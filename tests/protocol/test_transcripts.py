"""The protocol as stories that a reviewer can read: a change of behaviour is a diff of these files."""

import importlib.util
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location("stories", Path(__file__).with_name("stories.py"))
assert _spec is not None
assert _spec.loader is not None
stories = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(stories)


@pytest.mark.parametrize("name", sorted(path.stem for path in stories.FOLDER.glob("*.txt")))
def test_the_machines_react_as_the_transcript_says(name: str) -> None:
    transcript = (stories.FOLDER / f"{name}.txt").read_text()
    assert stories.Story().play(transcript) == transcript, "python tests/protocol/stories.py rewrites them"
