"""One checker per invariant, each in its own file, called where the fact is.

    fresh      I1  when a scheduler takes loaded tokens as computed: by content and by provenance
    held       I2  on what was accepted: was its source held all the time?
    fenced     I3  where a pool frees or hands out a block, and where a copy lands
    bounded    I4  after every step, and of every client's request
    whole      I5  at rest
    contained  I6  around every event; and what the engine itself has contained

What clients are told is judged by `answers`: I1 and I6, seen from outside.
"""
