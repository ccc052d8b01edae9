"""What the model is told of a call that did not run, or whose outcome is unknown: one fixed text a reason; pure.

Laws:
* A text never changes its meaning: it stays in the session's prompt for ever.
* "Not run" is said only of a call that has certainly not begun.

Source: design.md section 8; the table "Endings of calls" in docs/protocol.md is this one.
"""

from __future__ import annotations

# Not run.
NOT_RUN = "Not run: the turn ended before this call."
STOPPED = "Not run: boxmaker was stopped before this call."
OVER_ITERATIONS = "Not run: the turn's limit of tool calls was reached."
OVER_TIME = "Not run: the turn's time was over before this call."
REPLY_CUT = "Not run: the reply was cut at its length limit. Ask again in smaller pieces."
ALREADY_CALLED = "Not run: this call was already made with these arguments in this turn. Its result is above."
REPEATED_AGAIN = "Not run: the same call was repeated again, so the turn was ended."
AFTER_REPEAT = "Not run: the turn was ended before this call."
NO_APPROVAL = "The call needs the owner's approval, and this version cannot wait for it."

# It may have run, and what came of it is not known.
INTERRUPTED = "Interrupted: the call was running when the turn ended; its outcome is unknown."
TIMED_OUT = "Interrupted: the call took longer than it may; its outcome is unknown."
KILLED = "Interrupted: boxmaker failed while the call may have been running; its outcome is unknown."


def unknown_tool(name: str, core_names: str) -> str:
    """The text for a name that is no tool of the request; `core_names` are those that are."""
    return f"Unknown tool {name!r}. The tools are {core_names}; find_tool finds more, call_tool calls them."


def unknown_to_call_tool(name: str, *, core: bool) -> str:
    """The text for a name that `call_tool` does not run; `core` when it is called by its own name."""
    if core:
        return f"Unknown to call_tool: the tool {name!r} is called by its own name."
    return f"Unknown tool {name!r} for call_tool. find_tool with an empty query lists them all."


def bad_arguments(reason: str) -> str:
    """The text for arguments that are no JSON object, or not the tool's."""
    return f"The arguments did not parse: {reason}"


def call_denied(reason: str) -> str:
    """The text for a call that the owner's grants do not allow."""
    return f"The call was denied: {reason}"
