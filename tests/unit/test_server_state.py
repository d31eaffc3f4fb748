"""`ServerState`: every transition from every phase; through the engine it is tested in test_client.py."""

import pytest

from qlora_rl.engine.client.state import UNVERIFIED, Phase, ServerState
from qlora_rl.errors import EngineBrokenError, EngineClosedError, RolloutCancelledError, SyncError

NEW, KNOWN, IN_DOUBT, RECOVERING, CLOSED = Phase
BRINGS_TO = {
    NEW: (),
    KNOWN: (("answer", "one"),),
    IN_DOUBT: (("answer", "one"), ("doubt",)),
    RECOVERING: (("answer", "one"), ("begin_recovery", "two")),
    CLOSED: (("answer", "one"), ("close",)),
}


def in_phase(phase):
    state = ServerState("http://server")
    for name, *arguments in BRINGS_TO[phase]:
        getattr(state, name)(*arguments)
    assert state.phase is phase
    return state


@pytest.mark.parametrize(
    ("phase", "transition", "leads_to", "start"),
    [
        (NEW, ("answer", "new"), KNOWN, "new"),
        (KNOWN, ("answer", "new"), KNOWN, "one"),
        (IN_DOUBT, ("answer", "new"), IN_DOUBT, UNVERIFIED),
        (RECOVERING, ("answer", "new"), RECOVERING, "two"),
        (CLOSED, ("answer", "new"), CLOSED, "one"),
        (NEW, ("doubt",), IN_DOUBT, UNVERIFIED),
        (KNOWN, ("doubt",), IN_DOUBT, UNVERIFIED),
        (IN_DOUBT, ("doubt",), IN_DOUBT, UNVERIFIED),
        (RECOVERING, ("doubt",), RECOVERING, UNVERIFIED),
        (CLOSED, ("doubt",), CLOSED, UNVERIFIED),
        (NEW, ("begin_recovery", "new"), RECOVERING, "new"),
        (KNOWN, ("begin_recovery", "new"), RECOVERING, "new"),
        (IN_DOUBT, ("begin_recovery", "new"), RECOVERING, "new"),
        (NEW, ("end_recovery",), NEW, ""),
        (KNOWN, ("end_recovery",), KNOWN, "one"),
        (IN_DOUBT, ("end_recovery",), IN_DOUBT, UNVERIFIED),
        (RECOVERING, ("end_recovery",), KNOWN, "two"),
        (CLOSED, ("end_recovery",), CLOSED, "one"),
        (NEW, ("close",), CLOSED, ""),
        (KNOWN, ("close",), CLOSED, "one"),
        (IN_DOUBT, ("close",), CLOSED, UNVERIFIED),
        (RECOVERING, ("close",), CLOSED, "two"),
        (CLOSED, ("close",), CLOSED, "one"),
    ],
)
def test_a_transition_leads_from_each_phase_to_one_other(phase, transition, leads_to, start):
    state = in_phase(phase)
    name, *arguments = transition
    getattr(state, name)(*arguments)
    assert (state.phase, state.start) == (leads_to, start)
    assert state.is_in_doubt == (start == UNVERIFIED)


@pytest.mark.parametrize(
    ("phase", "error", "said"),
    [(RECOVERING, EngineBrokenError, "twice in a row"), (CLOSED, EngineClosedError, "it was closed")],
)
def test_a_recovery_begins_neither_within_another_nor_after_the_end(phase, error, said):
    state = in_phase(phase)
    before = state.phase, state.start
    with pytest.raises(error, match=said):
        state.begin_recovery("new")
    assert (state.phase, state.start) == before


def test_doubt_during_a_recovery_is_there_after_it():
    state = in_phase(RECOVERING)
    state.doubt()
    state.end_recovery()
    assert (state.phase, state.start) == (IN_DOUBT, UNVERIFIED)


@pytest.mark.parametrize("has_pushed", [False, True])
@pytest.mark.parametrize(
    ("error", "leads_to"),
    [
        (SyncError, KNOWN),
        (EngineBrokenError, IN_DOUBT),
        (RolloutCancelledError, IN_DOUBT),
        (KeyboardInterrupt, IN_DOUBT),
        (OSError, IN_DOUBT),
    ],
)
def test_only_a_push_without_an_answer_leaves_doubt(has_pushed, error, leads_to):
    state = in_phase(KNOWN)
    if has_pushed:
        state.serve(3, "digest", (b"bytes", 3))
    during = ((3, "digest"),) if has_pushed else ((0, ""),)
    seen = []

    def push():
        with state.changing():
            seen.append(state.asked)
            raise error("because")

    with pytest.raises(error, match="because"):
        push()
    assert seen == [during]
    assert state.phase is leads_to
    # Undone, a first push leaves the bare base; rejected, it leaves whatever serves.
    assert state.asked == (during if has_pushed or leads_to is IN_DOUBT else ())
    assert state.pushed == ((b"bytes", 3) if has_pushed else None)


def test_what_was_asked_for_follows_pushes_and_a_withdrawal_lasts_until_the_next():
    state = in_phase(KNOWN)
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
    assert state.phase is KNOWN
