"""What one rank executes in a step: input batch, model, sampler and the connector's hooks."""
