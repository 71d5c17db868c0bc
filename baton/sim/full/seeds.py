"""Every seed that ever failed, with its reason. They run first, for ever.

A world is what its seed and this package make of it: a seed found long ago may tell another story today.
"""

FAILED: dict[str, dict[int, str]] = {
    "pull": {
        0: "a loan kept the blocks that the last chunk of its prompt saw in a window, and nobody would read",
    },
    "push": {
        1153: "P announced a cached block that another prompt of the same step had still to compute",
    },
}
