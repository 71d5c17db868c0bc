"""The handoff as sans-IO state machines: messages and time in, effects out. docs/protocol.md specifies it.

No clock, socket, thread, random number or tensor: `now` is an argument, effects are returned values, and the
driver that carries them out decides nothing.
"""
