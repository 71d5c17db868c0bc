"""Comparison of Baton with its peers in one session, with the same model and prompts."""
