"""Benchmarks that are not in the wheel: the comparison with peers, and those of single features."""
