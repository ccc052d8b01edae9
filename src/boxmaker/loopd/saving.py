"""Keeps a session's cache over the loss of its slot: saves the slot through the server, and restores it.

Laws:
* The server is asked to save or restore only with the slot's gate in hand and the slot seen idle.
* A slot is restored only for a prompt that goes on from the saved one, on a server that is the same.
* Whatever fails here is told to the daemon's log; the turn goes on as if nothing could be saved.
* We wait for saving and restoring at most `[slots] save_s` before a request, and as long at the end. What we do not
  wait for any more goes on in the server, and the slot is busy until it is done.

After a completion a slot holds the tokens of its prompt and of the reply, without the last one. Only that is saved:
after a refusal or a cancel nobody knows what is there.
Source: issue 8, item 6; `/slots/{id}?action=…` as measured (`../shared/llama-server.md`, 5).
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

import trio
from attrs import define, evolve

from boxmaker.config import MIB, Config
from boxmaker.errors import InferenceError
from boxmaker.inference.client import Answer, Client
from boxmaker.inference.facts import limits_of, template_digest
from boxmaker.log import log_event, log_exception
from boxmaker.proto.ids import SessionId
from boxmaker.proto.saved import SavedSlot, ServerIdentity, prompt_mark
from boxmaker.session.disk import Disk
from boxmaker.session.saved import SavedFiles


@define
class _Occupant:
    """Who was in a slot last, by our own record: the session, its last request, and whether that is saved.

    `left` is how many tokens the slot held after its completion; None while there is none, and after a cancel.
    `restored` is what was brought back for a completion that has not come yet.
    """

    session: SessionId
    body: bytes
    saved: bool = False
    left: int | None = None
    restored: SavedSlot | None = None


class SlotSaver:
    """Saves and restores the slots of one daemon; in `turn/` it is a `SlotKeeper`."""

    def __init__(self, client: Client, config: Config, disk: Disk, directory: Path) -> None:
        self._client = client
        self._save_s = config.slots.save_s
        self._most_bytes = config.slots.save_mib * MIB
        self._disk = disk
        self._files = SavedFiles(directory, config.paths.home)
        self._occupants: dict[int, _Occupant] = {}
        self._useless: set[ServerIdentity] = set()
        self._off = False

    async def sweep(self, sessions: Path) -> None:
        """At start: remove what no session of ours has any use for."""
        try:
            swept = await self._disk.run(lambda: self._files.sweep(lambda one: os.path.lexists(sessions / one)))
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
        before = self._occupants.pop(slot, None)
        # of a session that has moved, the slot that it was in has nothing newer
        self._occupants = {other: one for other, one in self._occupants.items() if one.session != session}
        occupant = _Occupant(session, body)
        if before is not None and before.session == session:
            occupant.restored = before.restored
        acted = False
        if not self._off:
            with trio.move_on_after(self._save_s) as limit:
                if before is not None and before.session != session and self._is_worth_saving(slot, before):
                    acted = True
                    await self._save(slot, before, keep=session)
                if before is None:
                    acted |= await self._restore(slot, occupant, self._held(slot), left)
                elif before.session != session or self._is_emptied(slot):
                    acted |= await self._restore(slot, occupant, None, None)
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

    def _is_worth_saving(self, slot: int, occupant: _Occupant) -> bool:
        """Is what an occupant's completion has left there still, as far as can be seen, and not saved yet?

        A request that was refused or cancelled has left who knows what: nothing of it is saved.
        """
        held = self._held(slot)
        there = occupant.left is not None and held in (None, occupant.left) and not self._is_emptied(slot)
        return there and not occupant.saved

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
        if 2 * cached < restored.tokens:
            self._useless.add(restored.server)
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
            saved = SavedSlot(session=session, slot=slot, server=server, prompt=mark, tokens=0, bytes=0)
            await self._disk.run(lambda: self._files.remove(session))
            await self._disk.run(lambda: self._files.write(saved))
            answer = await self._act(slot, "save", session)
            tokens, size = answer.value.get("n_saved"), await self._disk.run(lambda: self._files.size(session))
            if size is None or size != answer.value.get("n_written"):
                self._off = True
                log_event("slot_not_saved", slot=slot, session=session, reason="save_dir is not the server's")
                return
            if type(tokens) is not int or tokens < 1 or tokens != occupant.left:
                await self._disk.run(lambda: self._files.remove(session))
                log_event("slot_not_saved", slot=slot, session=session, reason="the slot holds something else")
                return
            saved = evolve(saved, tokens=tokens, bytes=size)
            await self._disk.run(lambda: self._files.write(saved))
            occupant.saved = True
            took = round(1000 * (trio.current_time() - began))
            log_event("slot_saved", slot=slot, session=session, tokens=tokens, bytes=size, ms=took)
            for gone in await self._disk.run(lambda: self._files.keep_within(self._most_bytes, keep)):
                log_event("saved_slot_removed", session=gone, reason="save_mib")
        except (InferenceError, OSError, _Refused) as exc:
            self._fail("slot_not_saved", exc, slot=slot, session=session)
        except Exception:  # a boundary as the cause finder's: a fault of ours here is no turn's
            log_exception("slot_not_saved", slot=slot, session=session)

    async def _restore(self, slot: int, occupant: _Occupant, held: int | None, left: int | None) -> bool:
        """Restore a session's slot for its request if that is of use; True when the server was asked to.

        The slot holds `held` tokens, the session's last completion left `left`; None where we know who was in it.
        """
        session = occupant.session
        asked = False
        try:
            saved = await self._disk.run(lambda: self._files.read(session))
            if saved is None or await self._is_there(slot, saved, held, left):
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
            answer = await self._act(slot, "restore", session)
            self._client.record.restored(slot)
            if answer.value.get("n_restored") != saved.tokens:
                raise _Refused(f"{answer.value.get('n_restored')} tokens of {saved.tokens} came back")
            occupant.restored = saved
            log_event("slot_restored", slot=slot, session=session, tokens=saved.tokens)
            await self._disk.run(lambda: self._files.write(evolve(saved, slot=slot)))
        except (InferenceError, OSError, _Refused) as exc:
            self._fail("slot_not_restored", exc, slot=slot, session=session)
            if isinstance(exc, _Refused):
                await self._forget(session)
        except Exception:  # as in `_save`
            log_exception("slot_not_restored", slot=slot, session=session)
        return asked

    async def _is_there(self, slot: int, saved: SavedSlot, held: int | None, left: int | None) -> bool:
        """Does the slot hold the session's tokens still, those that were saved or more, although we have begun anew?"""
        if held is None or (held != left and held != saved.tokens):
            return False
        return held > saved.tokens or await self._disk.run(lambda: self._files.last_in(slot)) == saved.session

    async def _forget(self, session: SessionId) -> None:
        """A file that the server does not take is of no use to it again."""
        try:
            await self._disk.run(lambda: self._files.remove(session))
        except OSError as exc:
            self._fail("slots_not_swept", exc, session=session)

    async def _act(self, slot: int, action: str, session: SessionId) -> Answer:
        """Have the server save or restore.

        Raises:
            InferenceError: no answer.
            _Refused: any other answer than an object with status 200.
        """
        body = {"filename": self._files.kv_name(session)}
        answer = await self._client.ask("POST", f"/slots/{slot}?action={action}", body)
        if answer.status == 501:
            self._off = True  # started without --slot-save-path, or without --slots
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
        return server_identity(props, models)

    def _fail(self, event: str, exc: Exception, **fields: object) -> None:
        reason = (exc.strerror or str(exc)) if isinstance(exc, OSError) else str(exc)
        log_event(event, reason=reason, **fields)


class _Refused(Exception):
    """The server did not do what it was asked; the text says why."""


def server_identity(props: Any, models: Any) -> ServerIdentity | None:
    """Who a server is by `/props` and `/v1/models`; None when it names no model file or no context."""
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
    )


def _model_bytes(models: Any) -> int | None:
    try:
        size = models["data"][0]["meta"]["size"]
    except (LookupError, TypeError):
        return None
    return size if type(size) is int and size >= 0 else None


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
