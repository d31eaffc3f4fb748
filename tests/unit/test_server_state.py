"""`ServerState`: every change from every state; through the engine it is tested in test_client.py."""

import pytest

from qlora_rl.engine.client.state import UNVERIFIED, ServerState
from qlora_rl.errors import EngineBrokenError, EngineClosedError, RolloutCancelledError, SyncError

BRINGS_TO = {
    "new": (),
    "known": (("answer", "one"),),
    "in doubt": (("answer", "one"), ("doubt",)),
    "recovering": (("answer", "one"), ("begin_recovery", "two")),
    "closed": (("answer", "one"), ("close",)),
}


def brought(to):
    state = ServerState("http://server")
    for name, *arguments in BRINGS_TO[to]:
        getattr(state, name)(*arguments)
    return state


@pytest.mark.parametrize(
    ("before", "change", "start"),
    [
        ("new", ("answer", "new"), "new"),
        ("known", ("answer", "new"), "one"),
        ("in doubt", ("answer", "new"), UNVERIFIED),
        ("recovering", ("answer", "new"), "two"),
        ("closed", ("answer", "new"), "one"),
        *((before, ("doubt",), UNVERIFIED) for before in BRINGS_TO),
        *((before, ("begin_recovery", "new"), "new") for before in ("new", "known", "in doubt")),
        ("new", ("end_recovery",), ""),
        ("known", ("end_recovery",), "one"),
        ("in doubt", ("end_recovery",), UNVERIFIED),
        ("recovering", ("end_recovery",), "two"),
        ("closed", ("end_recovery",), "one"),
        ("in doubt", ("close",), UNVERIFIED),
        ("recovering", ("close",), "two"),
    ],
)
def test_a_change_leads_from_each_state_to_one_other(before, change, start):
    state = brought(before)
    name, *arguments = change
    getattr(state, name)(*arguments)
    assert (state.start, state.is_in_doubt) == (start, start == UNVERIFIED)
    begun = before == "recovering" and name != "end_recovery"
    assert state.is_recovering == (begun or name == "begin_recovery")
    assert state.is_closed == (before == "closed" or name == "close")


@pytest.mark.parametrize(
    ("before", "error", "said"),
    [("recovering", EngineBrokenError, "twice in a row"), ("closed", EngineClosedError, "it was closed")],
)
def test_a_recovery_begins_neither_within_another_nor_after_the_end(before, error, said):
    state = brought(before)
    start = state.start
    with pytest.raises(error, match=said):
        state.begin_recovery("new")
    assert state.start == start


def test_doubt_during_a_recovery_is_there_after_it():
    state = brought("recovering")
    state.doubt()
    state.end_recovery()
    assert (state.is_recovering, state.is_in_doubt) == (False, True)


@pytest.mark.parametrize("has_pushed", [False, True])
@pytest.mark.parametrize(
    ("error", "is_in_doubt"),
    [
        (SyncError, False),
        (EngineBrokenError, True),
        (RolloutCancelledError, True),
        (KeyboardInterrupt, True),
        (OSError, True),
    ],
)
def test_only_a_push_without_an_answer_leaves_doubt(has_pushed, error, is_in_doubt):
    state = brought("known")
    if has_pushed:
        state.serve(3, "digest", (b"bytes", 3))
    during = ((3, "digest"),) if has_pushed else ((0, ""),)
    seen = []

    def push():
        with state.pushes(7):
            seen.append(state.asked)
            raise error("because")

    with pytest.raises(error, match="because"):
        push()
    assert seen == [during]
    assert state.is_in_doubt == is_in_doubt
    # Undone, a first push leaves the bare base; rejected, it leaves whatever serves.
    assert state.asked == (during if has_pushed or is_in_doubt else ())
    assert state.pushed == ((b"bytes", 3) if has_pushed else None)


def test_what_was_asked_for_follows_pushes_and_a_withdrawal_lasts_until_the_next():
    state = brought("known")
    state.serve(1, "one", (b"1", 1))
    state.serve(2, "two", (b"2", 2))
    assert (state.asked, state.pushed) == (((1, "one"), (2, "two")), (b"2", 2))
    state.withdraw("it was lost")
    assert (state.asked.newest, state.pushed) == ((2, "two"), None)
    with pytest.raises(EngineBrokenError, match=r"it was lost\. Push again"):
        state.reject_withdrawn()
    state.serve(3, "three", (b"3", 3))
    state.reject_withdrawn()
    state.forget()
    assert (state.asked.newest, state.pushed, state.withdrawn) == ((3, "three"), None, "")
    assert not state.is_in_doubt
