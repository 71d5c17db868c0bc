"""Benchmarks that users run on their machines: ratios against a limit measured in the same run."""
