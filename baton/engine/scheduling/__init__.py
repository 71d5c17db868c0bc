"""Scheduler: admission, steps, preemption, and the connector's scheduler half. No torch, no clock."""
