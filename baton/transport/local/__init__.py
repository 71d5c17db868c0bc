"""Transport between processes of one host: a mapping of the peer's memory, or cross-memory attach."""
