"""Slots in host memory: their rows, their index, and the free memory of the host."""
