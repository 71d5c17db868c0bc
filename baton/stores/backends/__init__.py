"""Stores: files, buckets, Redis, and several of them as one; with limits of size, age and bandwidth."""
