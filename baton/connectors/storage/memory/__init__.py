"""Tier in host memory: slots of one engine, which copies between its cache and them."""
