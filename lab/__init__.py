"""The simulator, benchmarks and the chaos matrix: what developers run and users do not. No wheel has it."""
