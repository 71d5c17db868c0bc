"""Fuzzer of the control listener: a listener as in production, and frames that no honest peer would send.

    python -m baton.testing.fuzz --frames 1000000

For all input: nothing raises, memory stays bounded, and only the claimer of a loan extends or frees it.
"""

from baton.testing.fuzz.frames import Cast, FrameMaker
from baton.testing.fuzz.listener import FloodResult, flood

__all__ = ["Cast", "FloodResult", "FrameMaker", "flood"]
