"""Settings of the whole suite. Fixtures live beside the tests that use them."""

import os

# Set before anything imports torch: the machine is small, and several engines run at once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
