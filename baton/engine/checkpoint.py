"""The former place of `load_model_config`, kept for one release: import it from baton."""

from baton.engine.checkpoints.checkpoint import load_model_config as load_model_config
