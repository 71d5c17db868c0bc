"""Hugging Face model folders: what they declare, and random ones for tests and demos."""
