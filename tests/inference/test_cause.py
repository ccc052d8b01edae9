"""Which cause is named for a loss, and that none is named without its proof: worked-out examples."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from boxmaker.inference.cause import (
    Evidence,
    LossFacts,
    ServerKnown,
    SlotRecord,
    SlotSeen,
    Verdict,
    changed,
    compare_prompts,
    judge_prompts,
    last_reply,
    may_be_unused,
    proven,
    slot_seen,
    undisturbed,
    unproven,
)
from tests.inference.recordings import unhurried

NOTHING = SlotSeen(used=False, task=None, held=None, n_ctx=None)
UNUSED = SlotSeen(used=False, task=None, held=None, n_ctx=2048)


def used(held: int | None, task: int | None = 15) -> SlotSeen:
    return SlotSeen(used=True, task=task, held=held, n_ctx=2048)


def known(model: str | None = "m", n_ctx: int | None = 2048, slot: int = 0) -> ServerKnown:
    return ServerKnown(model=model, n_ctx=n_ctx, slot=slot)


def loss(evidence: Evidence, *, got: int = 7, before: ServerKnown | None = None, now: ServerKnown | None = None) -> Any:
    return LossFacts(expected=100, got=got, prompt=80, before=before, now=now or known(), evidence=evidence)


# -- what `/slots` says --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entry", "seen"),
    [
        # as recorded from b11434: a slot that was never used, and one that a request has left
        ({"id": 0, "n_ctx": 2048, "speculative": False, "is_processing": False}, UNUSED),
        ({"id": 1, "n_ctx": 2048, "is_processing": False, "id_task": 41, "n_prompt_tokens": 73}, used(73, 41)),
        ({"id": 1, "n_ctx": 2048, "id_task": -1}, UNUSED),
        ({"id": 1, "n_ctx": 2048, "id_task": 3}, used(None, 3)),
        ({"id": 1, "n_ctx": 2048, "n_prompt_tokens": 0}, used(0, None)),
        ({"id": 1, "n_ctx": "2048", "id_task": True, "n_prompt_tokens": 1.5}, NOTHING),
    ],
)  # fmt: skip
def test_an_entry_of_slots_says_whether_it_was_used_and_what_it_holds(entry: dict[str, Any], seen: SlotSeen) -> None:
    assert slot_seen(entry) == seen


# -- our own record ------------------------------------------------------------------------------


def test_the_record_names_the_last_other_session_that_used_the_slot() -> None:
    record = SlotRecord()
    record.used(0, "a")
    assert record.completed(0, "a") == Evidence()
    for session in ("b", "c"):
        record.used(0, session)
        record.completed(0, session)
    record.used(1, "d")
    record.used(0, "a")
    assert record.completed(0, "a") == Evidence(watched=True, other="c")
    record.used(0, "a")
    assert record.completed(0, "a") == Evidence(watched=True)


def test_the_record_counts_requests_of_the_session_itself_that_had_no_answer() -> None:
    record = SlotRecord()
    record.used(0, "a")
    record.completed(0, "a")
    record.used(0, "a")
    record.used(0, "a")
    assert record.completed(0, "a").tries == 2
    record.used(0, "a")
    assert record.completed(0, "a").tries == 1


def test_the_last_look_is_there_until_a_completion_has_come() -> None:
    record = SlotRecord()
    assert record.seen(0) is None
    record.looked(0, used(7))
    record.used(0, "a")
    assert record.seen(0) == used(7)
    assert record.seen(1) is None
    record.completed(0, "a")
    assert record.seen(0) is None


def test_a_fork_has_what_the_session_had_there() -> None:
    record = SlotRecord()
    record.used(0, "a")
    record.completed(0, "a")
    record.used(0, "b")
    record.forked("a", "fork")
    record.forked("nobody", "other")
    record.used(0, "fork")
    # whether a went on after the point where it was forked is not known: as if there had been a try without an answer
    assert record.completed(0, "fork") == Evidence(other="b", tries=2)
    record.used(1, "other")
    assert record.completed(1, "other") == Evidence()


def test_a_server_that_begins_anew_is_counted_and_a_restored_slot_is_not_one() -> None:
    record = SlotRecord()
    for seen in (UNUSED, used(7, 3), used(9, 3), used(9, 8)):
        record.looked(0, seen)
    assert record.renewals == 0
    record.looked(0, UNUSED)
    record.looked(0, UNUSED)
    assert record.renewals == 1, "it was used and is not any more"
    record.looked(0, used(7, 5))
    record.looked(0, used(4, 2))
    assert record.renewals == 2, "its numbers went back"
    record.restored(0, "a")
    record.looked(0, UNUSED)
    assert record.renewals == 2


def test_a_slots_holder_is_the_session_whose_request_was_answered_last_be_it_in_part() -> None:
    record = SlotRecord()
    assert record.holder(0) is None
    record.used(0, "a")
    assert (record.holder(0), record.holder(1)) == ("a", None)
    record.used(0, "b", streamed=False)
    assert record.holder(0) is None, "the server may have begun with it"
    record.used(0, "a")
    record.restored(0, "a")
    assert record.holder(0) is None, "until it has answered"


def test_what_a_restored_slot_showed_before_is_what_counts() -> None:
    record = SlotRecord()
    record.used(0, "a")
    record.completed(0, "a")
    record.looked(0, used(55, 9))
    record.restored(0, "a")
    record.looked(0, UNUSED)
    assert record.seen(0) == UNUSED
    record.used(0, "a")
    # which of the server's requests was there before that one is not known
    assert record.completed(0, "a") == Evidence(seen=used(55, 9), shows_use=True, watched=True)
    record.looked(0, UNUSED)
    record.used(0, "a")
    assert record.completed(0, "a").seen == UNUSED, "of the request after it no more"
    record.restored(0, "b")  # and the turn was cancelled then
    record.used(0, "a")
    assert record.completed(0, "a").other == "b"


def test_a_look_counts_for_the_request_that_follows_it_alone() -> None:
    record = SlotRecord()
    record.looked(0, UNUSED)
    record.used(0, "a")
    assert record.completed(0, "a") == Evidence(seen=UNUSED, shows_use=False)
    record.looked(0, used(30, 4))
    record.used(0, "a")
    assert record.completed(0, "a") == Evidence(seen=used(30, 4), shows_use=True, watched=True)
    record.used(0, "a")
    assert record.completed(0, "a").seen is None
    record.looked(0, used(9, 2))
    record.used(0, "a")
    assert record.completed(0, "a") == Evidence(seen=used(9, 2), shows_use=True, task_before=4, watched=True)


# -- what is proven without asking ---------------------------------------------------------------

NOT_KNOWN: list[tuple[LossFacts, Verdict | None]] = [
    # nothing was seen, and nothing is known
    (loss(Evidence()), None),
    (loss(Evidence(), before=known(None, None)), None),
    # another model or context
    (loss(Evidence(), before=known("old")), Verdict(cause="model", detail={"what": "model", "was": "old", "now": "m"})),
    (
        loss(Evidence(other="b"), before=known(n_ctx=512)),
        Verdict(cause="model", detail={"what": "n_ctx", "was": 512, "now": 2048}),
    ),
    (
        loss(Evidence(), before=known(slot=1)),
        Verdict(cause="evicted", detail={"session": None, "slot_before": 1}),
    ),
    # the slot holds what we left there: whatever else is known, the prompts must be compared
    (loss(Evidence(seen=used(100), shows_use=True, watched=True), before=known()), None),
    # but not after another session: it may hold as many tokens
    (loss(Evidence(seen=used(100), other="b", watched=True)), Verdict(cause="evicted", detail={"session": "b"})),
    # another session of ours
    (loss(Evidence(seen=used(55), other="b")), Verdict(cause="evicted", detail={"session": "b"})),
    # never used since it began, by a server that would say so: it began anew after whoever had the slot
    (loss(Evidence(seen=UNUSED, shows_use=True), before=known()), Verdict(cause="restarted")),
    (loss(Evidence(seen=UNUSED, shows_use=True, other="b"), before=known()), Verdict(cause="restarted")),
    (loss(Evidence(seen=UNUSED), before=known()), None),
    # it holds something else, and it was not us
    (loss(Evidence(seen=used(55), watched=True), before=known()), Verdict(cause="foreign", detail={"held": 55})),
    (
        loss(Evidence(seen=used(55, 15), task_before=15, watched=True), before=known()),
        Verdict(cause="foreign", detail={"held": 55}),
    ),
    (
        loss(Evidence(seen=used(55, None), task_before=9, watched=True), before=known()),
        Verdict(cause="foreign", detail={"held": 55}),
    ),
    # the server's numbers have begun anew
    (loss(Evidence(seen=used(55, 2), task_before=15, watched=True), before=known()), Verdict(cause="restarted")),
    # it may have been us: before this daemon began, or with a request that had no answer
    (loss(Evidence(seen=used(55)), before=known()), None),
    (loss(Evidence(seen=used(55), watched=True, tries=2), before=known()), None),
    (loss(Evidence(seen=used(None), watched=True), before=known()), None),
    # of a completion that was made nobody knows where, no slot proves anything
    (loss(Evidence(seen=UNUSED, shows_use=True)), None),
    (loss(Evidence(seen=used(55), watched=True)), None),
    (loss(Evidence(seen=used(55, 2), task_before=15, watched=True)), None),
]


@pytest.mark.parametrize(("facts", "verdict"), NOT_KNOWN)
def test_a_cause_is_named_with_its_proof_alone(facts: LossFacts, verdict: Verdict | None) -> None:
    assert proven(facts) == verdict


@pytest.mark.parametrize(
    ("evidence", "cause"),
    [
        (Evidence(seen=used(55), other="b", watched=True), "evicted"),
        (Evidence(seen=used(55), watched=True), "foreign"),
        (Evidence(seen=UNUSED, shows_use=True, watched=True), "restarted"),
    ],
)
def test_a_slot_that_was_taken_is_not_the_cause_of_the_few_tokens_that_did_not_come_back(
    evidence: Evidence, cause: str
) -> None:
    """It was restored, or the server had kept it: the prompts tell, and only when they do not it was the slot."""
    taken = loss(evidence, got=49, before=known())
    assert proven(taken) is not None
    back = loss(evidence, got=50, before=known())
    assert proven(back) is None
    before = "<S><user>Hello<assistant>"
    erased = judge_prompts(loss(evidence, got=81, before=known()), before, f"{before}Hi there<user>Hello", ASKED, 2)
    assert (erased.cause, erased.detail["was"]) == ("template", "Greet.")
    whole = judge_prompts(back, before, f"{before}Greet. Hi there<user>Hello", ASKED, 2)
    assert whole.cause == unproven(back, extension=False).cause == cause


def test_another_model_is_the_cause_of_any_loss() -> None:
    swapped = loss(Evidence(), got=99, before=known("old"))
    assert proven(swapped) == Verdict(cause="model", detail={"what": "model", "was": "old", "now": "m"})


def test_what_is_not_known_has_not_changed() -> None:
    assert changed("template", None, "x") is None
    assert changed("template", "x", None) is None
    assert changed("template", "x", "x") is None


def test_a_slot_may_be_unused_when_nothing_at_all_was_cached() -> None:
    assert may_be_unused(loss(Evidence(seen=UNUSED), got=0, before=known()))
    assert not may_be_unused(loss(Evidence(seen=UNUSED), got=1, before=known()))
    assert not may_be_unused(loss(Evidence(seen=used(0)), got=0, before=known()))
    assert not may_be_unused(loss(Evidence(), got=0, before=known()))
    assert not may_be_unused(loss(Evidence(seen=UNUSED), got=0)), "it may have been another slot"


def test_without_a_proof_the_cause_says_what_is_still_possible() -> None:
    held = loss(Evidence(seen=used(100)), before=known())
    assert undisturbed(held)
    assert unproven(held, extension=True) == Verdict(cause="reread")
    assert unproven(held, extension=False) == Verdict(cause="unknown")
    for evidence in (Evidence(), Evidence(seen=used(99)), Evidence(seen=UNUSED)):
        here = loss(evidence, before=known())
        assert not undisturbed(here)
        assert unproven(here, extension=True) == Verdict(cause="restarted_or_foreign")
        assert unproven(here, extension=False) == Verdict(cause="restarted_or_foreign")
        assert unproven(loss(evidence), extension=True) == Verdict(cause="unknown")
    assert not undisturbed(loss(Evidence(seen=used(100), other="b"), before=known()))
    assert not undisturbed(loss(Evidence(seen=used(100)))), "it may be another session's"
    assert unproven(loss(Evidence(tries=2), before=known()), extension=True) == Verdict(cause="unknown")


# -- rendered prompts ----------------------------------------------------------------------------


def message(role: str, content: str, reasoning: str | None = None) -> dict[str, Any]:
    made: dict[str, Any] = {"role": role, "content": content}
    return made if reasoning is None else {**made, "reasoning_content": reasoning}


NOTE = "[No answer was given.]"
ASKED = [
    message("system", "S"),
    message("user", "Hello"),
    message("assistant", "Hi there", "Greet."),
    message("user", "Hello"),
]


def test_the_last_reply_is_no_note_of_ours() -> None:
    assert last_reply(ASKED, NOTE) == 2
    assert last_reply([*ASKED, message("assistant", NOTE), message("user", "?")], NOTE) == 2
    assert last_reply([*ASKED, message("assistant", ""), message("tool", "x")], NOTE) == 4
    assert last_reply(ASKED[:2], NOTE) is None
    assert last_reply([], NOTE) is None
    assert last_reply([*ASKED, message("assistant", "At the end")], NOTE) == 4
    assert last_reply([message("assistant", "Before all others"), message("user", "?")], NOTE) == 0


def test_a_prompt_that_goes_on_with_the_reply_is_an_extension() -> None:
    before = "<S><user>Hello<assistant>"
    assert compare_prompts(before, f"{before}<think>Greet.</think>Hi there<user>Hello<assistant>", ASKED, 2) is None
    calls = [*ASKED[:2], {"role": "assistant", "content": "", "tool_calls": []}, message("tool", "x")]
    assert compare_prompts(before, f"{before}<call><tool>x<assistant>", calls, 2) is None
    quoted = [*ASKED[:2], message("assistant", 'a "b"\nc')]
    assert compare_prompts(before, before + '{"content":"a \\"b\\"\\nc"}', quoted, 2) is None


def test_an_answer_may_stand_right_behind_the_prompt() -> None:
    assert (
        compare_prompts("<S><user>Hello<a>", "<S><user>Hello<a>Hi<user>", [*ASKED[:2], message("assistant", "Hi")], 2)
        is None
    )


CALLED = [*ASKED[:2], {"role": "assistant", "content": "", "tool_calls": [{"id": "c"}]}, message("tool", "x")]
HELD = Evidence(seen=used(100), watched=True)


@pytest.mark.parametrize(
    ("got", "cause"),
    [
        # the prompt before had 80 tokens, the slot held 100: how its calls should look nobody knows
        (97, "unknown"),
        (80, "unknown"),
        (72, "unknown"),  # a tokenizer may merge what meets at the seam
        (71, "reread"),
    ],
)
def test_behind_calls_a_loss_may_be_the_templates_way_to_write_them(got: int, cause: str) -> None:
    before = "<S><user>Hello<assistant>"
    called = judge_prompts(loss(HELD, got=got, before=known()), before, f"{before}<call><tool>x<a>", CALLED, 2)
    assert called == Verdict(cause=cause)  # type: ignore[arg-type]  # each is one
    said = judge_prompts(loss(HELD, got=got, before=known()), before, f"{before}Greet. Hi there<user>Hello", ASKED, 2)
    assert said == Verdict(cause="reread")


@pytest.mark.parametrize(
    ("after", "got", "cause"),
    [
        # 16 characters of 25 are as before, so about 51 of 80 tokens could stay: half of that is near enough
        ("<S><user>Hello<a>Hi there", 26, "template"),
        ("<S><user>Hello<a>Hi there", 25, "restarted_or_foreign"),
        # the reply alone is printed otherwise: 80 could stay
        ("<S><user>Hello<assistant>Hi there", 40, "template"),
        ("<S><user>Hello<assistant>Hi there", 39, "restarted_or_foreign"),
    ],
)
def test_a_template_is_not_the_cause_of_much_more_than_it_has_changed(after: str, got: int, cause: str) -> None:
    before = "<S><user>Hello<assistant>"
    asked = judge_prompts(loss(Evidence(seen=used(60)), got=got, before=known()), before, after, ASKED, 2)
    assert asked.cause == cause
    undisturbed = judge_prompts(loss(HELD, got=got, before=known()), before, after, ASKED, 2)
    assert undisturbed.cause == "template", "a model that cannot go back loses all behind a small change"


def test_the_json_form_of_an_answer_counts_whole_alone() -> None:
    quoted = [*ASKED[:2], message("assistant", 'x"y')]
    verdict = compare_prompts("<a>", '<a>{"content":"\\"y"}', quoted, 2)
    assert verdict is not None
    assert verdict.detail == {"message": 3, "role": "assistant", "was": 'x"y', "now": '{"content":"\\"y"}'}


@pytest.mark.parametrize(
    ("contents", "before", "at", "number"),
    [
        (("a", "a"), "<u>a<b>a<c>", 3, 1),  # the same text twice: the place decides
        (("a", "a"), "<u>a<b>a<c>", 4, 2),
        (("a", "a"), "<u>a<b>a<c>", 7, 2),
        (("a", "a"), "<u>a<b>a<c>", 8, 3),
        (("ab", "c"), "ab<c>", 0, 1),  # a text that begins the prompt
        (("ab", "c"), "ab<c>", 2, 2),
        (("", "c"), "<c>", 0, 2),  # a message without text has no place of its own
        (('x"y', "z"), '"x\\"y" "z"', 4, 1),  # in its JSON form, to its last character
        (('x"y', "z"), '"x\\"y" "z"', 5, 2),
    ],
)  # fmt: skip
def test_each_place_of_a_prompt_has_its_message(contents: tuple[str, str], before: str, at: int, number: int) -> None:
    messages = [message("user", text) for text in contents] + [message("assistant", "the reply")]
    after = before[:at] + "~" + before[at + 1 :]
    verdict = compare_prompts(before, after, messages, 2)
    assert verdict is not None
    assert verdict.detail["message"] == number


def test_reasoning_that_is_not_rendered_again_is_the_templates() -> None:
    before = "<S><user>Hello<assistant>"
    assert compare_prompts(before, f"{before}Hi there<user>Hello<assistant>", ASKED, 2) == Verdict(
        cause="template",
        detail={"message": 3, "role": "assistant", "was": "Greet.", "now": "Hi there<user>Hello<assistant>"},
    )


def test_an_answer_that_is_rendered_otherwise_is_the_templates() -> None:
    before = "<S><user>Hello<assistant>"
    after = f"{before}<think>Greet.</think>Hi  there<user>"
    assert compare_prompts(before, after, ASKED, 2) == Verdict(
        cause="template",
        detail={"message": 3, "role": "assistant", "was": "Hi there", "now": "<think>Greet.</think>Hi  there<user>"},
    )


@pytest.mark.parametrize(
    ("before", "after", "number", "role", "was", "now"),
    [
        # a date in the system message; the text that differs, not the message, tells
        ("<at 23:59 S><user>Hello<a>", "<at 00:00 S><user>Hello<a>", 1, "system", "23:59 S><", "00:00 S><"),
        ("<S><user>Hello<assistant>", "<S><user>HELLO<assistant>", 2, "user", "ello<", "ELLO<"),
        # right behind a message's text the next one begins
        ("<S><user>Hello<a>", "<S><user>Hello!<a>", 3, "assistant", "<a>", "!<a>"),
        # thinking off: the end of the prompt is not what stands in the history
        ("<S><user>Hello<a><think></think>", "<S><user>Hello<a>Hi there", 3, "assistant", "<think>", "Hi there"),
        ("<S><user>Hello<assistant>", "<S><user>Hel", 2, "user", "lo<assistant>", ""),
    ],
)  # fmt: skip
def test_the_first_difference_has_its_message(
    before: str, after: str, number: int, role: str, was: str, now: str
) -> None:
    verdict = compare_prompts(before, after, ASKED, 2)
    assert verdict is not None
    assert (verdict.cause, verdict.detail["message"], verdict.detail["role"]) == ("template", number, role)
    assert str(verdict.detail["was"]).startswith(was)
    assert str(verdict.detail["now"]).startswith(now)
    assert was == "" or verdict.detail["was"] != verdict.detail["now"]


def test_a_message_that_a_template_leaves_out_is_passed_over() -> None:
    messages = [message("system", "not rendered"), message("user", "Hello"), message("assistant", "Hi")]
    verdict = compare_prompts("<Hello><a>", "<Hallo><a>Hi", messages, 2)
    assert verdict is not None
    assert verdict.detail == {"message": 2, "role": "user", "was": "ello><a>", "now": "allo><a>Hi"}


def test_of_a_differing_text_eighty_characters_are_kept() -> None:
    verdict = compare_prompts("a" * 200, "b" * 200, ASKED, 2)
    assert verdict is not None
    assert (verdict.detail["was"], verdict.detail["now"]) == ("a" * 80, "b" * 80)


@unhurried
@given(st.text(), st.text(), st.lists(st.builds(message, st.just("user"), st.text()), max_size=3))
def test_prompts_of_any_text_give_an_extension_or_a_place(before: str, after: str, asked: list[Any]) -> None:
    messages = [*asked, message("assistant", "Hi", "Hm")]
    verdict = compare_prompts(before, after, messages, len(asked))
    if verdict is None:
        assert after.startswith(before)
    else:
        assert 1 <= int(str(verdict.detail["message"])) <= len(messages)
