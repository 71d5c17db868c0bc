"""The control channel between two engines, encrypted and authenticated (CURVE over ZMQ)."""
