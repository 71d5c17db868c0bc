"""Policies that decide which keys stay when a tier is full: pure functions of keys."""
