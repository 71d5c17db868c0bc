"""Execution of a step on one rank: input batch, model, sampler and the connector's hooks."""
