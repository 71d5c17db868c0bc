"""Settings of the whole suite. Fixtures live beside the tests that use them."""

import os

from hypothesis import settings

# Set before anything imports torch: the machine is small, and several engines run at once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# No test asserts wall time; an example that took long says that the machine was busy.
settings.register_profile("baton", deadline=None)
settings.load_profile("baton")
