"""Fixtures of the kit's own tests."""

import pytest
from hypothesis.internal.conjecture import providers


@pytest.fixture(autouse=True)
def seed_settles_all_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hypothesis also draws from the constants of all loaded modules: they differ from session to session.

    With them a search for one fault took from 2 s to more than 100 s of CPU time.
    """
    none = providers.Constants()
    monkeypatch.setattr(providers, "_get_local_constants", lambda: none)
    providers.CONSTANTS_CACHE.cache.clear()
