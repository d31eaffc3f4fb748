"""The newest version and the one before it."""

from qlora_rl.versions import Versions


def test_the_newest_version_and_the_one_before_it_are_kept_and_no_older_one():
    live = Versions()
    assert (live.newest, live.before, bool(live)) == (None, None, False)
    for pushed, kept in (("a", ("a",)), ("b", ("a", "b")), ("c", ("b", "c"))):
        live = live.with_newest(pushed)
        assert live == kept
        assert live.newest == pushed
    assert live.before == "b"


def test_a_failed_push_is_undone_with_the_former_value():
    former = Versions().with_newest("a").with_newest("b")
    former.with_newest("c")
    assert former == ("a", "b")


def test_a_revoked_version_gives_way_to_the_one_before_it_and_that_one_to_none():
    live = Versions().with_newest("a").with_newest("b").without_newest()
    assert (live.newest, live.before) == ("a", None)
    assert live.without_newest() == ()
    assert live.without_newest().without_newest() == ()


def test_an_overwritten_version_before_the_newest_is_forgotten():
    live = Versions().with_newest("a").with_newest("b").without_before()
    assert (live.newest, live.before) == ("b", None)
    assert live.without_before() == live
    assert Versions().without_before() == ()
