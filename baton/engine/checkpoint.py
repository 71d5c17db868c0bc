"""Former module of `load_model_config`, kept for one release: import the function from `baton`."""

from baton.engine.checkpoints.checkpoint import load_model_config as load_model_config
