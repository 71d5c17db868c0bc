"""The interface of a transport, and what several wires share. No module of it knows a wire."""
