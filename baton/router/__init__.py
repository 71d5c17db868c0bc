"""P/D router: sends each prompt to a prefill engine, then to a decode engine with the ticket it got.

Light: imports nothing but `baton.core` and an HTTP stack, so it starts in a second and runs anywhere.
"""
