"""What a half may raise so that its host understands more than "it failed"."""

from baton.core.errors import BatonError


class ConnectorDead(BatonError):
    """This half will never work again, and says so itself: a thread that it cannot do without has ended.

    A host that can retires it at once instead of waiting whether the next step goes better.
    """
