"""Which slot a session has: each law by a story, and all of them by any story."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from boxmaker.loopd.pins import Pins
from boxmaker.proto.ids import SessionId
from tests.inference.recordings import unhurried

A, B, C, D = (SessionId(name) for name in "abcd")


def begun(pins: Pins, session: SessionId) -> int:
    """A new session's first turn, from begin to end."""
    return turn(pins, session, pins.begin(session))


def turn(pins: Pins, session: SessionId, began_on: int) -> int:
    slot = pins.pin(session, began_on)
    pins.over(session)
    return slot


def test_new_sessions_take_the_slots_in_their_order_then_the_least_recently_used() -> None:
    pins = Pins((2, 0))
    assert [begun(pins, session) for session in (A, B)] == [2, 0]
    assert turn(pins, A, 2) == 2
    assert begun(pins, C) == 0, "b's slot was used longest ago"
    assert begun(pins, D) == 2


def test_a_session_keeps_its_slot_while_it_is_listed() -> None:
    pins = Pins((0, 1))
    assert turn(pins, A, 1) == 1
    assert begun(pins, B) == 0
    assert [turn(pins, A, 1), turn(pins, B, 0), turn(pins, A, 1)] == [1, 0, 1]


def test_a_session_whose_slot_is_not_listed_any_more_moves_once() -> None:
    pins = Pins((0, 1))
    assert begun(pins, A) == 0
    assert turn(pins, B, 7) == 1
    assert turn(pins, A, 0) == 0
    assert turn(pins, B, 7) == 1, "its log still names the slot that it began on"


def test_sessions_of_before_have_used_their_slots_in_their_order() -> None:
    assert Pins((0, 1), [(A, 1), (B, 0)]).begin(C) == 1
    assert Pins((0, 1), [(A, 0), (B, 1), (A, 0)]).begin(C) == 1
    assert Pins((0, 1), [(A, 5), (B, 0)]).begin(C) == 1, "slot 5 is none of ours"
    assert Pins((0, 1), [(A, 0)]).pin(A, 0) == 0


def test_a_session_that_could_not_be_begun_has_used_nothing() -> None:
    pins = Pins((0, 1))
    assert pins.begin(A) == 0
    pins.forget(A)
    assert pins.begin(B) == 0
    assert turn(pins, B, 0) == 0
    pins.forget(B)  # it is there
    assert pins.begin(C) == 1
    assert turn(pins, A, 1) == 1
    pins.forget(C)  # but a has used that slot meanwhile
    assert pins.begin(D) == 0


def test_sessions_that_began_on_one_slot_keep_it_when_more_are_listed() -> None:
    pins = Pins((0, 1), [(A, 0), (B, 0)])
    assert [turn(pins, A, 0), turn(pins, B, 0), turn(pins, A, 0)] == [0, 0, 0]
    assert begun(pins, C) == 1, "a fork is a new session"


def test_a_new_session_does_not_wait_behind_a_turn_while_another_slot_is_free() -> None:
    pins = Pins((0, 1))
    assert pins.pin(A, pins.begin(A)) == 0
    assert begun(pins, B) == 1
    assert begun(pins, C) == 1, "the turn of a runs still, though it began first"
    pins.over(A)
    assert begun(pins, D) == 1, "a turn uses its slot to its end"
    pins.over(A)
    assert pins.pin(A, 0) == 0, "ended twice is ended"


def test_two_sessions_that_are_begun_at_once_have_different_slots() -> None:
    pins = Pins((0, 1))
    assert {pins.begin(A), pins.begin(B)} == {0, 1}


def test_beginning_a_session_that_is_there_changes_nothing() -> None:
    pins = Pins((0, 1))
    assert begun(pins, A) == 0
    assert pins.begin(A) == 0
    pins.forget(A)
    assert pins.begin(B) == 1


@unhurried
@given(
    st.lists(st.integers(0, 4), min_size=1, unique=True),
    st.lists(st.tuples(st.sampled_from([A, B, C, D]), st.sampled_from(["begin", "fail", "turn"]))),
)
def test_sessions_share_a_slot_only_when_every_slot_has_one(
    listed: list[int], story: list[tuple[SessionId, str]]
) -> None:
    pins = Pins(listed)
    slots: dict[SessionId, int] = {}
    for session, what in story:
        if session in slots:
            assert turn(pins, session, slots[session]) == slots[session]
        elif what == "fail":
            pins.begin(session)
            pins.forget(session)
        else:
            slots[session] = begun(pins, session)
            assert slots[session] in listed
        assert len(set(slots.values())) == min(len(slots), len(listed))
