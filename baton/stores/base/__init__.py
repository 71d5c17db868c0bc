"""The interface of a store, and the values that all stores share."""
