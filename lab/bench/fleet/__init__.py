"""Routing policies on recorded traces, in a simulated fleet."""
