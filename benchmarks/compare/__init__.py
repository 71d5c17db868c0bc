"""`scripts/bench compare`: Baton beside its peers, in one session, with the same model and prompts."""
