"""Transport between processes on one GPU."""
