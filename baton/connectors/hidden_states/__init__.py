"""Saving of the hidden states of prompts and answers to files."""

from baton.connectors.hidden_states.connector import BatonHiddenStatesConnector
from baton.connectors.hidden_states.reading import load_hidden_states

__all__ = ["BatonHiddenStatesConnector", "load_hidden_states"]
