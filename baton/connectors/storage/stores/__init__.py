"""Tiers in stores: files, buckets and Redis, for every engine with the same model and layout."""
