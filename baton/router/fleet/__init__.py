"""The engines of a fleet, and the choice among them."""
