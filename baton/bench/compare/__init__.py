"""`baton bench compare`: Baton beside its peers, in turns in one session, with the same model and prompts."""
