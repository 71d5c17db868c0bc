"""Every seed that ever failed, with its reason. They run first, for ever.

A world is what its seed and this package make of it: a seed found long ago may tell another story today.
"""

FAILED: dict[str, dict[int, str]] = {
    "pull": {},
    "push": {
        1153: "P announced a cached block that another prompt of the same step had still to compute",
    },
}
