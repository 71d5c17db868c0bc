"""One checker per invariant, each in its own file, called where the fact is.

    fresh      I1  at delivery, and until the end of use
    held       I2  where P frees
    fenced     I3  where D frees, and where a copy lands
    bounded    I4  at every start, outcome and end
    whole      I5  at rest
    contained  I6  around every event

They look at the world's facts (baton.sim.facts), never at what a machine says of itself; the one exception
is I2, which asks D whether it would still accept.
"""
