"""Errors that a connector half may raise to tell its host more than that it failed."""

from baton.core.errors import BatonError


class ConnectorDead(BatonError):
    """This half will never work again, as it knows itself: for example, a thread that it needs has ended.

    The host can then retire it at once instead of trying further steps.
    """
