"""Ways to move bytes between processes, behind one interface. They know addresses, not meaning."""
