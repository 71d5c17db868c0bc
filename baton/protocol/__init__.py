"""The KV handoff as sans-IO state machines: messages and time in, effects out. Specified by docs/protocol.md.

No clock, socket, thread, random number or tensor. `now` is an argument and effects are returned values. The
driver executes the effects and makes no decisions.
"""
