"""Keeps a session's cache over the loss of its slot: saves the slot through the server, and restores it.

Laws:
* The server is asked to save or restore only with the slot's gate in hand and the slot seen idle.
* A slot is restored only for a prompt that goes on from the saved one, on a server that is the same.
* Whatever fails here is told to the daemon's log; the turn goes on as if nothing could be saved.
* We wait for saving and restoring at most `[slots] save_s` before a request, and as long at the end. What we do not
  wait for any more goes on in the server, and the slot is busy until it is done.
* A state that is saved stays until a newer one is there whole, or until it comes back with another count of tokens. A
  server that refuses it may only have no room just now.

After a completion a slot holds the tokens of its prompt and of the reply, without the last one. After a reply that was
broken off it holds those of the completion before and more, of which the server takes what the next request begins
with. After a refusal, or a request that the server did not begin to answer, nobody knows whose tokens are there.
Source: issue 8, item 6; `/slots/{id}?action=…` as measured (`../shared/llama-server.md`, 5).
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import trio
from attrs import define, evolve

from boxmaker.config import MIB, Config
from boxmaker.errors import InferenceError, StorageError
from boxmaker.inference.client import Answer, Client
from boxmaker.inference.facts import limits_of, short_digest, template_digest
from boxmaker.log import log_event, log_exception
from boxmaker.proto.codec import dumps
from boxmaker.proto.ids import SessionId
from boxmaker.proto.saved import SavedSlot, ServerIdentity, prompt_mark
from boxmaker.session.disk import Disk
from boxmaker.session.logs import session_ids
from boxmaker.session.saved import SavedFiles

IDLE_LOOK_S = 0.1
"""How often a slot is looked at that the server is about to leave."""


@define
class _Occupant:
    """Who was in a slot last, by our own record: the session, its last request, and whether that is saved.

    `left` is how many tokens the slot held after its completion; None while there is none, and after a cancel. `sure`
    of the tokens there were the session's before that request. `restored` is what was brought back for a completion
    that has not come yet.
    """

    session: SessionId
    body: bytes
    sure: int
    saved: bool = False
    left: int | None = None
    restored: SavedSlot | None = None


class SlotSaver:
    """Saves and restores the slots of one daemon; in `turn/` it is a `SlotKeeper`."""

    def __init__(
        self,
        client: Client,
        config: Config,
        disk: Disk,
        directory: Path,
        in_use: Sequence[tuple[SessionId, int]],
    ) -> None:
        """`in_use`: sessions of before with the slots they began on, the last used last."""
        self._client = client
        self._save_s = config.slots.save_s
        self._most_bytes = config.slots.save_mib * MIB
        self._disk = disk
        self._files = SavedFiles(directory, config.paths.home)
        self._occupants: dict[int, _Occupant] = {}
        self._presumed = last_in_slots(config.slots.listed, in_use)
        self._useless: set[ServerIdentity] = set()
        self._did_little: set[ServerIdentity] = set()
        """Those whose last restore brought back less than half of what it should have."""
        self._off_since: int | None = None

    @property
    def _off(self) -> bool:
        """Has the server said that it saves nothing? Until it begins anew: it may be told otherwise then."""
        return self._off_since == self._client.record.renewals

    def _turn_off(self) -> None:
        self._off_since = self._client.record.renewals

    async def sweep(self, sessions: Path) -> None:
        """At start: remove what no session of ours has any use for."""
        try:
            swept = await self._disk.run(lambda: self._files.sweep(session_ids(sessions)))
        except StorageError as exc:
            log_event("slots_not_swept", reason=exc.reason)
        except OSError as exc:
            self._fail("slots_not_swept", exc)
        else:
            if swept:
                log_event("saved_slots_swept", count=swept)

    async def prepare(self, slot: int, session: SessionId, body: bytes, left: int | None) -> bool:
        """A request of a session is about to go to a slot that is idle and ours: have its cache there.

        Saves what another session of ours has in the slot, and restores what this one has saved. After the session's
        last completion its slot held `left` tokens. True when the server was asked to do either: then the slot is to be
        looked at again.

        Cancellation: safe at any point; the server finishes what it was asked, and the slot's next request waits.
        """
        before = self._occupants.get(slot)
        presumed = self._presumed.pop(slot, None)
        # of a session that has moved, the slot that it was in has nothing newer
        self._occupants = {other: one for other, one in self._occupants.items() if one.session != session}
        occupant = _Occupant(session, body, left or 0)
        if before is not None and before.session == session and not self._is_disturbed(slot, before):
            occupant.restored = before.restored
        acted = False
        if not self._off:
            with trio.move_on_after(self._save_s) as limit:
                if before is not None and before.session != session and self._is_worth_saving(slot, before):
                    acted = True
                    await self._save(slot, before, keep=session)  # cancelled here, the one before is in the slot still
                self._occupants.pop(slot, None)
                if before is None:
                    acted |= await self._restore(slot, occupant, left, in_slot=presumed == session)
                elif before.session != session or self._is_disturbed(slot, before):
                    acted |= await self._restore(slot, occupant, left, in_slot=False)
            if limit.cancelled_caught:
                acted = True
                log_event("slot_saving_took_too_long", slot=slot, save_s=self._save_s)
        self._occupants[slot] = occupant
        return acted

    def _held(self, slot: int) -> int | None:
        seen = self._client.record.seen(slot)
        return seen.held if seen is not None else None

    def _is_emptied(self, slot: int) -> bool:
        """Has the server begun anew since the slot was used?"""
        seen = self._client.record.seen(slot)
        return self._client.record.shows_use and seen is not None and not seen.used

    def _is_better_left(self, slot: int, saved: int, left: int | None) -> bool:
        """Is what was saved so old that the slot may still hold more, or be given more by the server?

        A server keeps in its memory what was in a slot that others have taken, and brings it back to the next request
        (its `--cache-ram`), but not into a slot that was restored. One that has begun anew has nothing.
        """
        seen = self._client.record.seen(slot)
        if left is None or saved >= left or seen is None or not seen.used:
            return False
        return seen.held == left or 10 * saved < 9 * left

    def _is_disturbed(self, slot: int, occupant: _Occupant) -> bool:
        """Does the slot show something else than its occupant's completion has left?"""
        held = self._held(slot)
        return self._is_emptied(slot) or (occupant.left is not None and held not in (None, occupant.left))

    def _is_worth_saving(self, slot: int, occupant: _Occupant) -> bool:
        """Is what an occupant's request has left there still, as far as can be seen, and not saved yet?"""
        if occupant.saved or self._is_emptied(slot):
            return False
        held = self._held(slot)
        if occupant.left is not None:
            return held in (None, occupant.left)
        return self._is_broken_off(slot, occupant) and held is not None and held >= max(occupant.sure, 1)

    def _is_broken_off(self, slot: int, occupant: _Occupant) -> bool:
        """Was the occupant's last reply broken off in its middle? The server takes a moment to notice."""
        return occupant.left is None and self._client.record.holder(slot) == occupant.session

    def completed(self, slot: int, session: SessionId, cached: int | None, left: int | None) -> int | None:
        """The session has its completion, which `left` so many tokens in the slot: judge the restore before it.

        Gives how many tokens that one brought back.
        """
        occupant = self._occupants.get(slot)
        if occupant is None or occupant.session != session:
            return None
        occupant.left = left
        restored, occupant.restored = occupant.restored, None
        if restored is None or cached is None:
            return None
        if 2 * cached >= restored.sure:
            self._did_little.discard(restored.server)
        else:
            # what was broken off may be where a server cannot go back to, and a template may drop a part once
            nothing = 10 * cached < restored.sure or restored.server in self._did_little
            if restored.sure == restored.tokens:
                (self._useless if nothing else self._did_little).add(restored.server)
            log_event("slot_restore_useless", slot=slot, session=session, tokens=restored.tokens, cached=cached)
        return restored.tokens

    async def drain(self) -> None:
        """The daemon ends: save what our slots hold, in `save_s` all together.

        Cancellation: safe at any point.
        """
        with trio.move_on_after(self._save_s) as limit:
            for slot, occupant in self._occupants.items():
                if self._off or occupant.saved:
                    continue
                look = await self._client.look(slot)
                while look.state == "busy" and self._is_broken_off(slot, occupant):
                    await trio.sleep(IDLE_LOOK_S)
                    look = await self._client.look(slot)
                if look.state == "idle" and self._is_worth_saving(slot, occupant):
                    await self._save(slot, occupant)
        if limit.cancelled_caught:
            log_event("slot_saving_took_too_long", save_s=self._save_s)

    async def _save(self, slot: int, occupant: _Occupant, keep: SessionId | None = None) -> None:
        session = occupant.session
        try:
            server = await self._server()
            mark = prompt_mark(occupant.body)
            if server is None or server in self._useless or mark is None:
                return
            began = trio.current_time()
            saved = SavedSlot(session=session, server=server, prompt=mark, tokens=0, sure=0, bytes=0)
            saved = await self._write(slot, occupant, saved)
            took = round(1000 * (trio.current_time() - began))
            log_event("slot_saved", slot=slot, session=session, tokens=saved.tokens, bytes=saved.bytes, ms=took)
            for gone in await self._disk.run(lambda: self._files.keep_within(self._most_bytes, keep)):
                log_event("saved_slot_removed", session=gone, reason="save_mib")
        except (InferenceError, OSError, _Refused) as exc:
            self._fail("slot_not_saved", exc, slot=slot, session=session)
        except Exception:  # a boundary as the cause finder's: a fault of ours here is no turn's
            log_exception("slot_not_saved", slot=slot, session=session)

    async def _write(self, slot: int, occupant: _Occupant, saved: SavedSlot) -> SavedSlot:
        """Have the server write a slot's file, and put it in place; the record with what there is now.

        Raises:
            InferenceError, OSError, _Refused: what was saved before is there still.
        """
        session, name = saved.session, self._files.saving_name(saved.session)
        there = occupant.left if occupant.left is not None else self._held(slot)
        try:
            await self._disk.run(lambda: self._files.begin(saved))
            answer = await self._act(slot, "save", name)
            tokens, size = answer.value.get("n_saved"), await self._disk.run(lambda: self._files.size(name))
            if size is None or size != answer.value.get("n_written"):
                self._turn_off()
                raise _Refused("save_dir is not the server's")
            if type(tokens) is not int or tokens < 1 or tokens != there:
                raise _Refused("the slot holds something else")
            sure = tokens if occupant.left is not None else occupant.sure
            saved = evolve(saved, tokens=tokens, sure=sure, bytes=size)
            await self._disk.run(lambda: self._files.complete(saved))
            occupant.saved = True
        finally:
            if not occupant.saved:
                await self._give_up(session)
        return saved

    async def _give_up(self, session: SessionId) -> None:
        """Remove what a save that failed has left. Cancellation: not; else its room is lost until the next start."""
        with trio.CancelScope(shield=True):
            try:
                await self._disk.run(lambda: self._files.give_up(session))
            except OSError as exc:
                self._fail("slots_not_swept", exc, session=session)

    async def _restore(self, slot: int, occupant: _Occupant, left: int | None, *, in_slot: bool) -> bool:
        """Restore a session's slot for its request if that is of use; True when the server was asked to.

        The session's last completion left `left` tokens. `in_slot`: it was in the slot last, as far as is known.
        """
        session = occupant.session
        asked = False
        try:
            saved = await self._disk.run(lambda: self._files.read(session))
            if saved is None or self._is_better_left(slot, saved.tokens, left):
                return False
            if in_slot and _is_there(saved.tokens, self._held(slot), left):
                return False
            server = await self._server()
            if server != saved.server or server in self._useless:
                log_event("slot_not_restored", slot=slot, session=session, reason="another server, or of no use there")
                return False
            if prompt_mark(occupant.body, saved.prompt.messages) != saved.prompt:
                log_event("slot_not_restored", slot=slot, session=session, reason="another prompt")
                await self._disk.run(lambda: self._files.remove(session))
                return False
            asked = True
            answer = await self._act(slot, "restore", self._files.kv_name(session))
            self._client.record.restored(slot, session)
            if answer.value.get("n_restored") != saved.tokens:
                await self._disk.run(lambda: self._files.remove(session))
                raise _Refused(f"{answer.value.get('n_restored')} tokens of {saved.tokens} came back")
            occupant.restored = saved
            log_event("slot_restored", slot=slot, session=session, tokens=saved.tokens)
            await self._disk.run(lambda: self._files.touch(session))
        except (InferenceError, OSError, _Refused) as exc:
            self._fail("slot_not_restored", exc, slot=slot, session=session)
        except Exception:  # as in `_save`
            log_exception("slot_not_restored", slot=slot, session=session)
        return asked

    async def _act(self, slot: int, action: str, name: str) -> Answer:
        """Have the server save or restore.

        Raises:
            InferenceError: no answer.
            _Refused: any other answer than an object with status 200.
        """
        answer = await self._client.ask("POST", f"/slots/{slot}?action={action}", {"filename": name})
        if answer.status == 501:
            self._turn_off()  # started without --slot-save-path, or without --slots
        if answer.status != 200 or not isinstance(answer.value, dict):
            raise _Refused(str(answer.error()))
        return answer

    async def _server(self) -> ServerIdentity | None:
        """Which server it is just now; None when it does not say enough.

        Raises:
            InferenceError: it could not be asked.
        """
        props = (await self._client.ask("GET", "/props")).value
        models = (await self._client.ask("GET", "/v1/models")).value
        lora = await self._client.ask("GET", "/lora-adapters")
        return server_identity(props, models, lora.value if lora.status == 200 else None)

    def _fail(self, event: str, exc: Exception, **fields: object) -> None:
        reason = (exc.strerror or str(exc)) if isinstance(exc, OSError) else str(exc)
        log_event(event, reason=reason, **fields)


class _Refused(Exception):
    """The server did not do what it was asked; the text says why."""


def last_in_slots(listed: Sequence[int], in_use: Sequence[tuple[SessionId, int]]) -> dict[int, SessionId]:
    """Whose request went to each slot last, by the logs; to a slot that is alone go all, wherever they began."""
    return {listed[0] if len(listed) == 1 else slot: session for session, slot in in_use}


def _is_there(saved: int, held: int | None, left: int | None) -> bool:
    """Does a slot hold what a session has had there, or what was saved of it, although we have begun anew?

    It holds more where we were killed in the middle of a turn, and what was saved is older than its last completion.
    """
    if held is None:
        return False
    return held in (saved, left) or (left is not None and saved < left < held)


def server_identity(props: Any, models: Any, lora: Any) -> ServerIdentity | None:
    """Who a server is by `/props`, `/v1/models`, `/lora-adapters`; None when it names no model file or no context."""
    if not isinstance(props, dict) or type(props.get("model_path")) is not str:
        return None
    n_ctx, _ = limits_of(props)
    if n_ctx is None:
        return None
    build = props.get("build_info")
    return ServerIdentity(
        model_path=props["model_path"],
        model_bytes=_model_bytes(models),
        n_ctx=n_ctx,
        template=template_digest(props),
        build=build if type(build) is str else None,
        lora=short_digest(dumps(lora)) if lora else None,
    )


def _model_bytes(models: Any) -> int | None:
    try:
        size = models["data"][0]["meta"]["size"]
    except (LookupError, TypeError):
        return None
    return size if type(size) is int and size >= 0 else None


def is_open_to_all(directory: Path) -> bool:
    """May everybody enter a directory? The server writes its files so that whoever may can read them."""
    real = directory.resolve()
    return all(one.stat().st_mode & stat.S_IXOTH for one in (real, *real.parents))


def save_dir_problem(directory: Path) -> str | None:
    """Why slots cannot be kept in a directory; None when they can.

    Files there are the server's, so removing them needs the right to write the directory, and no sticky bit on it
    unless it is ours.
    """
    try:
        found = os.stat(directory)
    except OSError as exc:
        return exc.strerror or str(exc)
    if not stat.S_ISDIR(found.st_mode):
        return os.strerror(errno.ENOTDIR)
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        return "loopd may not read, write and remove there"
    if found.st_mode & stat.S_ISVTX and os.geteuid() not in (0, found.st_uid):
        return "its sticky bit lets nobody remove the server's files"
    return None
