"""One rank's KV of one chunk, and the asynchronous jobs that move chunks to and from stores."""
