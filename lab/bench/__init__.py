"""Benchmarks outside of the wheel: the comparison with peers, and benchmarks of single features."""
