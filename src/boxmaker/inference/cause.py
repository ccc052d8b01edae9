"""Why were tokens lost that could have been in the cache? A judgement from what was seen; pure.

Laws:
* A cause is named only with its proof; without one it is `restarted_or_foreign` or `unknown`.
* What is proven of the slot comes first: a slot that somebody else has emptied says nothing about the template; and the
  latest of several events: a session that had a slot before the server began anew is not what emptied it.
* A slot that still holds as many tokens as we left, and that no other session of ours had, is undisturbed: then only
  `template` and `reread` are left.
* What a slot shows is a proof only where the earlier completion is known to have been on that slot.

Source: design.md, "Where the tokens went"; `/slots` as measured (`../shared/llama-server.md`, 5 and 6).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import define, field, frozen

from boxmaker.proto.codec import JsonObject, dumps
from boxmaker.proto.ledger import CauseName

SHOWN_CHARACTERS = 80
"""How much of a differing text is kept."""
TAKEN: frozenset[CauseName] = frozenset({"evicted", "foreign", "restarted"})
"""Causes that take everything, unless it is brought back."""
SEAM_TOKENS = 8
"""Where two texts meet, a tokenizer may merge a few tokens: so few are no proof of anything."""


@frozen(kw_only=True)
class SlotSeen:
    """An idle slot as `/slots` lists it.

    `used`: a request has used it since the server began. `task` numbers the server's requests from its beginning,
    `held` is how many tokens it holds; None for what is not listed.
    """

    used: bool
    task: int | None
    held: int | None
    n_ctx: int | None


def slot_seen(entry: dict[str, Any]) -> SlotSeen:
    """Read an entry of `/slots`: a slot that was never used has no `id_task`, or -1."""
    task, held = _count(entry.get("id_task")), _count(entry.get("n_prompt_tokens"))
    return SlotSeen(used=task is not None or held is not None, task=task, held=held, n_ctx=_count(entry.get("n_ctx")))


def _count(value: object) -> int | None:
    return value if type(value) is int and value >= 0 else None


@frozen(kw_only=True)
class Evidence:
    """What was seen of a slot between two completions of a session.

    `seen` is the last look before the request, or before a saved state was put into the slot for it. `shows_use`: this
    server is known to list what was used. `task_before` is the slot's `task` at the look before that one. `watched`: we
    have seen the earlier completion (the daemon was not started after it). Since then `other` is the session that used
    the slot last, if another one did, and `tries` counts this session's own requests that may have used it, this one
    included.
    """

    seen: SlotSeen | None = None
    shows_use: bool = False
    task_before: int | None = None
    watched: bool = False
    other: str | None = None
    tries: int = 1


@define
class _Since:
    """What happened at a slot since a session's last completion there."""

    watched: bool = False
    other: str | None = None
    tries: int = 0


@define
class _Slot:
    seen: SlotSeen | None = None
    holder: str | None = None
    before_restore: SlotSeen | None = None
    used: bool = False
    task: int | None = None
    task_before: int | None = None
    sessions: dict[str, _Since] = field(factory=dict)


class SlotRecord:
    """Our own record of who used which slot, and how `/slots` showed it before each request."""

    def __init__(self) -> None:
        self._slots: dict[int, _Slot] = {}
        self.shows_use = False
        self.renewals = 0
        """How often the server was seen to have begun anew."""

    def looked(self, slot: int, seen: SlotSeen) -> None:
        """A look has found the slot free."""
        known = self._slots.setdefault(slot, _Slot())
        known.seen = seen
        if known.before_restore is not None:  # a slot that was restored is listed as never used
            return
        known.task_before, known.task = known.task, seen.task
        counts_anew = known.task is not None and known.task_before is not None and known.task < known.task_before
        self.renewals += counts_anew or (known.used and not seen.used)
        known.used = seen.used
        self.shows_use = self.shows_use or seen.used

    def restored(self, slot: int, session: str) -> None:
        """A saved state of a session was put into the slot."""
        known = self._slots.setdefault(slot, _Slot())
        known.before_restore = known.before_restore or known.seen
        known.used = False
        known.holder = None
        self._taken(known, session)

    def seen(self, slot: int) -> SlotSeen | None:
        """How the last look showed the slot, if no completion has come since."""
        known = self._slots.get(slot)
        return known.seen if known is not None else None

    def holder(self, slot: int) -> str | None:
        """Whose request the server has answered last from the slot, be it in part; None when that is not certain."""
        known = self._slots.get(slot)
        return known.holder if known is not None else None

    def used(self, slot: int, session: str, *, streamed: bool = True) -> None:
        """A request of a session has used the slot, or may have: the server has begun to stream what it answers."""
        known = self._slots.setdefault(slot, _Slot())
        known.holder = session if streamed else None
        known.sessions.setdefault(session, _Since()).tries += 1
        self._taken(known, session)

    def _taken(self, known: _Slot, session: str) -> None:
        for other, since in known.sessions.items():
            if other != session:
                since.other = session

    def forked(self, session: str, new: str) -> None:
        """A new session has what another one had; whether that has gone on since is not known."""
        for known in self._slots.values():
            since = known.sessions.get(session)
            if since is not None:
                known.sessions[new] = _Since(other=since.other, tries=1)

    def completed(self, slot: int, session: str) -> Evidence:
        """The session has its completion; give what was seen since the one before."""
        known = self._slots[slot]
        since = known.sessions[session]
        known.sessions[session] = _Since(watched=True)
        seen = known.before_restore or known.seen
        known.before_restore = known.seen = None  # a look counts for the request that follows it
        return Evidence(
            seen=seen,
            shows_use=self.shows_use,
            task_before=known.task_before,
            watched=since.watched,
            other=since.other,
            tries=since.tries,
        )


@frozen(kw_only=True)
class ServerKnown:
    """What a session's completion was made with; None for what is not known. `template` is a digest."""

    model: str | None
    n_ctx: int | None
    slot: int
    template: str | None = None


@frozen(kw_only=True)
class Verdict:
    """A cause, and what is to be said of it."""

    cause: CauseName
    detail: JsonObject = field(factory=dict)


@frozen(kw_only=True)
class LossFacts:
    """What is known of a loss before the server is asked; `before` is None when nothing is known of that completion.

    Its prompt had `prompt` tokens, without what was generated.
    """

    expected: int
    got: int
    prompt: int
    before: ServerKnown | None
    now: ServerKnown
    evidence: Evidence


def changed(what: str, was: object, now: object) -> Verdict | None:
    """The cause `model`, when both are known and differ."""
    if was is None or now is None or was == now:
        return None
    return Verdict(cause="model", detail={"what": what, "was": was, "now": now})


def undisturbed(facts: LossFacts) -> bool:
    """Did the slot hold as many tokens as we left there, just before the request?

    After another session of ours that proves nothing: sessions of one kind grow alike, to the token (seen).
    """
    evidence = facts.evidence
    ours = facts.before is not None and evidence.other is None
    return ours and evidence.seen is not None and evidence.seen.held == facts.expected


def proven(facts: LossFacts) -> Verdict | None:
    """The cause that our own record and the looks at the slot prove; None when the prompts must be compared.

    That is so too when the slot was taken, and most of it came back: we restored it, or the server had kept it.
    """
    came_back = 2 * facts.got >= facts.expected
    verdict = _by_slot(facts)
    return None if came_back and verdict is not None and verdict.cause in TAKEN else verdict


def _by_slot(facts: LossFacts) -> Verdict | None:
    before, now, evidence = facts.before, facts.now, facts.evidence
    seen = evidence.seen
    if before is not None:
        other = changed("model", before.model, now.model) or changed("n_ctx", before.n_ctx, now.n_ctx)
        if other is not None:
            return other
        if before.slot != now.slot:
            return Verdict(cause="evicted", detail={"session": None, "slot_before": before.slot})
        if seen is not None and evidence.shows_use and not seen.used:
            return Verdict(cause="restarted")
    if evidence.other is not None:
        return Verdict(cause="evicted", detail={"session": evidence.other})
    if seen is None or before is None or undisturbed(facts):
        return None
    if evidence.watched and evidence.tries == 1 and seen.held is not None:
        if seen.task is not None and evidence.task_before is not None and seen.task < evidence.task_before:
            return Verdict(cause="restarted")
        return Verdict(cause="foreign", detail={"held": seen.held})
    return None


def may_be_unused(facts: LossFacts) -> bool:
    """Was the slot listed as never used, by a server of which we do not know yet whether it lists that?"""
    seen = facts.evidence.seen
    return facts.before is not None and seen is not None and not seen.used and facts.got == 0


def unproven(facts: LossFacts, *, extension: bool) -> Verdict:
    """The cause when the prompts do not tell it; `extension`: the rendered prompt is known to be one."""
    verdict = _by_slot(facts)
    if verdict is not None:
        return verdict
    if not undisturbed(facts):
        ours = facts.before is None or facts.evidence.tries > 1
        return Verdict(cause="unknown" if ours else "restarted_or_foreign")
    return Verdict(cause="reread" if extension else "unknown")


def last_reply(messages: Sequence[dict[str, Any]], note: str) -> int | None:
    """Where the last completion's reply stands in a request: the last assistant message that is not our `note`."""
    for at in range(len(messages) - 1, -1, -1):
        if messages[at].get("role") == "assistant" and messages[at].get("content") != note:
            return at
    return None


def judge_prompts(facts: LossFacts, before: str, after: str, messages: Sequence[dict[str, Any]], reply: int) -> Verdict:
    """The cause by two rendered prompts, as `compare_prompts` takes them.

    A template that prints a text otherwise costs what stands behind that text. When much more was lost than that, from
    a slot that may have been disturbed, it is not the cause. How a template should have printed the reply's calls is
    not known: behind them a loss is `unknown`.
    """
    verdict = compare_prompts(before, after, messages, reply)
    if verdict is None:
        printed = not messages[reply].get("tool_calls") or facts.got < facts.prompt - SEAM_TOKENS
        return unproven(facts, extension=printed)
    kept = facts.prompt * _common(before, after) / max(len(before), 1)
    if undisturbed(facts) or facts.got >= kept / 2:
        return verdict
    return unproven(facts, extension=False)


def compare_prompts(before: str, after: str, messages: Sequence[dict[str, Any]], reply: int) -> Verdict | None:
    """Is a rendered prompt an extension of the one before and of what was answered to it? Then None.

    `before` is the rendering of the messages up to the one at `reply`, `after` that of all of them. The reply was
    generated behind `before`, so `after` must go on with its reasoning and its content.
    """
    if not after.startswith(before):
        at = _common(before, after)
        return _template(_message_at(at, before, messages[:reply], reply), messages, before[at:], after[at:])
    rest = after[len(before) :]
    for text in _texts(messages[reply]):
        if _end_of(text, rest, 0) is None:
            return _template(reply, messages, text, rest)
    return None


def _template(at: int, messages: Sequence[dict[str, Any]], was: str, now: str) -> Verdict:
    detail = {
        "message": at + 1,
        "role": messages[at].get("role"),
        "was": was[:SHOWN_CHARACTERS],
        "now": now[:SHOWN_CHARACTERS],
    }
    return Verdict(cause="template", detail=detail)


def _texts(message: dict[str, Any]) -> list[str]:
    """What a template prints of a message as it stands: reasoning first; templates trim at the ends."""
    found = (message.get("reasoning_content"), message.get("content"))
    return [text.strip() for text in found if isinstance(text, str) and text.strip()]


def _message_at(at: int, prompt: str, messages: Sequence[dict[str, Any]], behind: int) -> int:
    """Which message a place in a prompt belongs to; `behind` when it stands after the last of them."""
    begin = 0
    for number, message in enumerate(messages):
        for text in _texts(message):
            begin = _end_of(text, prompt, begin) or begin
        if at < begin:
            return number
    return behind


def _end_of(text: str, prompt: str, begin: int) -> int | None:
    """Where a text ends in a prompt, from `begin` on, as it is or as JSON; None where it is not."""
    for form in (text, dumps(text)[1:-1]):
        found = prompt.find(form, begin)
        if found >= 0:
            return found + len(form)
    return None


def _common(one: str, other: str) -> int:
    """How many characters two texts have in common, found in the time of a few comparisons."""
    least, most = 0, min(len(one), len(other))
    while least < most:
        middle = (least + most + 1) // 2
        if one[least:middle] == other[least:middle]:
            least = middle
        else:
            most = middle - 1
    return least
