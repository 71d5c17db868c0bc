"""The handoff benchmark: prefill and decode on two engines, beside one engine that does both."""
