"""One checker per invariant, each in its own file, called where the fact is.

    fresh      I1  where loaded tokens are accepted, and until the end of their use
    held       I2  where P frees, and of every copy that was accepted
    fenced     I3  where a pool frees or hands out a block, and where a copy lands
    bounded    I4  at every outcome, after every step, and of every request
    whole      I5  at rest
    contained  I6  around every event
    answers    I1 and I6 as clients see them

They compare facts of the world, not what a machine reports of itself. Two exceptions: I2 asks D
whether it would still accept, and I4 asks D when it last heard of a producer.
"""
