"""The processes of a router: one, or a coordinator and its workers."""
