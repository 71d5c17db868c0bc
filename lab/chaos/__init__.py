"""Chaos matrix: real Baton systems under load and faults; each answer is compared with a single engine's.

`make chaos` runs it; docs/chaos.md is its result. Not part of the wheel.
"""
