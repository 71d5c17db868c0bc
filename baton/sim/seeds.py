"""Every seed whose world ever broke, and why. They are run by every CI, whatever they mean by now.

A world is what its seed and the code of the world make of it: after a change of the world a seed stands for
another one. It stays here all the same; the reason is what is worth keeping.
"""

FAILED_ONCE: dict[tuple[str, int], str] = {
    (
        "pull",
        37,
    ): "the world's own: room was found for a request that had just failed, and never freed",
    (
        "push",
        1,
    ): "drivers say ready at every PeerReady, and the machine took that for a mistake",
    ("push", 3112): "the world's own: a prefill in a healed world was drawn to take longer than the deadline",
}
