"""Benchmarks: ratios against a limit or a peer measured in the same run. Not imported by anything else."""
