"""Answers to lookups: one answer for each request, and failed loads."""

from baton.hosts.vllm.tier.lookups import Lookups


def test_an_answer_is_kept_while_a_request_needs_it() -> None:
    lookups = Lookups()
    assert [lookups.ask(key, "r") for key in (b"a", b"b", b"a")] == [None, None, None]
    assert lookups.take_batch() == [b"a", b"b"]
    lookups.answer(b"a", True)
    lookups.answer(b"b", False)
    assert [lookups.ask(key, "r") for key in (b"a", b"b")] == [True, False]
    assert lookups.take_batch() == []
    lookups.forget("r")
    assert lookups.ask(b"b", "s") is None
    assert lookups.take_batch() == [b"b"]


def test_two_requests_share_a_lookup() -> None:
    lookups = Lookups()
    lookups.ask(b"a", "r")
    lookups.ask(b"a", "s")
    assert lookups.take_batch() == [b"a"]
    lookups.answer(b"a", True)
    lookups.forget("r")
    assert lookups.ask(b"a", "s") is True


def test_what_could_not_be_loaded_is_missing() -> None:
    lookups = Lookups()
    lookups.ask(b"a", "r")
    lookups.answer(b"a", True)
    lookups.answer(b"a", False)
    lookups.answer(b"never asked", False)
    assert lookups.ask(b"a", "r") is False


def test_a_request_that_has_ended_is_not_looked_up() -> None:
    lookups = Lookups()
    lookups.ask(b"a", "r")
    lookups.forget("r")
    assert lookups.take_batch() == []
    lookups.answer(b"a", True)
    assert lookups.ask(b"a", "s") is None
