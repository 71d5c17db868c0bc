"""A listener as it is in production, and frames that no honest peer would send.

    python -m baton.testing.fuzz --frames 1000000

What has to hold, whatever arrives: nothing raises, memory stays bounded, and nobody but its claimer extends,
frees or delivers anything.
"""

from baton.testing.fuzz.frames import Cast, FrameMaker
from baton.testing.fuzz.listener import FloodResult, flood

__all__ = ["Cast", "FloodResult", "FrameMaker", "flood"]
