"""The layers of `docs/design.md`, checked on every import in the source."""

from __future__ import annotations

import ast
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"

ORDER = [
    "errors", "log", "places", "proto.codec", "proto.ids", "proto.time", "proto.arguments", "proto.chat",
    "proto.records", "proto.ledger", "proto.saved", "proto.tools", "proto.channel", "proto.frames", "config",
    "inference.sse",
    "inference.completion", "inference.request", "inference.retry", "inference.cache", "inference.cause",
    "inference.families",
    "inference.slots", "inference.client", "inference.facts", "session.baseline", "session.replay", "session.disk",
    "session.fork", "session.ledger", "session.saved", "session.store", "session.logs",
    "tools.port", "tools.registry", "tools.endings", "tools.dispatch", "tools.fake",
    "turn.runtime", "turn.steering", "turn.calls", "turn.loop", "channel.peer", "channel.stop", "channel.server",
    "channel.client", "demo.server", "demo.run", "loopd.home", "loopd.saving", "loopd.selftest", "loopd.causes",
    "loopd.desk",
    "loopd.pins", "loopd.turns", "loopd.serve", "loopd.cli",
    "loopd.__main__", "bxctl.output", "bxctl.render", "bxctl.views", "bxctl.live",
    "bxctl.chat", "bxctl.control", "bxctl.logs", "bxctl.cache", "bxctl.cli", "bxctl.__main__",
    "testing.server", "testing.port", "testing.daemon", "testing.forced",
    "verify.judge", "verify.programs", "verify.device", "verify.demo", "verify.cli", "verify.__main__",
]  # fmt: skip
"""Each module may import those before it; a package's own `__init__` holds a docstring alone, or, for those outside of
the source, what the package is for. The source imports from the modules themselves."""

OWNERS = {
    "httpx": {"inference.client"},
    "cattrs": {"proto.codec"},
    "xllamacpp": {"demo.server"},
    "click": {"loopd.cli", "bxctl.cli", "verify.cli"},
    "tomllib": {"config"},
}
"""Foreign things that one module wraps, so that nothing else depends on them."""


def modules() -> dict[str, Path]:
    root = SOURCE / "boxmaker"
    found = {}
    for file in sorted(root.rglob("*.py")):
        name = ".".join(file.relative_to(root).with_suffix("").parts)
        found[name] = file
    return found


def imports(file: Path) -> set[str]:
    """Every module that a file imports, inside functions too; `boxmaker.` is left out."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            assert node.module is not None
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            known = {f"boxmaker.{name}" for name in modules()}
            found.update((names & known) or {node.module})
    return {name.removeprefix("boxmaker.") for name in found}


def test_every_module_has_its_place_in_the_order() -> None:
    packages = {name for name in modules() if name == "__init__" or name.endswith(".__init__")}
    assert set(modules()) - packages == set(ORDER)
    assert len(ORDER) == len(set(ORDER))


def test_a_module_imports_only_from_above_its_own_place() -> None:
    known = modules()
    wrong = [
        f"{name} imports {imported}"
        for at, name in enumerate(ORDER)
        for imported in imports(known[name])
        if imported in known and imported not in ORDER[:at] and not imported.endswith("__init__")
    ]
    assert wrong == []


def test_the_source_imports_from_modules_and_not_from_what_a_package_gives_to_others() -> None:
    packages = {name.removesuffix(".__init__") for name in modules() if name.endswith(".__init__")}
    wrong = [f"{name} imports {imported}" for name in ORDER for imported in imports(modules()[name]) & packages]
    assert wrong == []


def test_a_foreign_thing_is_imported_by_the_module_that_wraps_it() -> None:
    wrong = [
        f"{name} imports {imported}"
        for name, file in modules().items()
        for imported in imports(file)
        for thing, owners in OWNERS.items()
        if imported.partition(".")[0] == thing and name not in owners
    ]
    assert wrong == []


def test_pure_modules_have_no_clock_no_randomness_and_no_event_loop() -> None:
    pure = [
        "proto.codec", "proto.ids", "proto.time", "proto.arguments", "proto.chat", "proto.records", "proto.ledger",
        "proto.tools", "proto.channel", "proto.frames", "inference.sse", "inference.completion", "inference.request",
        "inference.retry", "inference.cache", "inference.cause", "session.replay", "session.fork", "tools.registry",
        "inference.families", "tools.endings", "tools.dispatch", "loopd.pins", "verify.judge",
    ]  # fmt: skip
    forbidden = {"trio", "time", "random", "secrets", "os", "socket", "logging", "boxmaker.log", "log"}
    wrong = {name: imports(modules()[name]) & forbidden for name in pure}
    assert {name: found for name, found in wrong.items() if found} == {}


def test_the_client_command_knows_neither_sessions_nor_the_server() -> None:
    for name in (
        "bxctl.output",
        "bxctl.render",
        "bxctl.live",
        "bxctl.views",
        "bxctl.chat",
        "bxctl.control",
        "bxctl.logs",
        "bxctl.cache",
        "bxctl.cli",
        "channel.client",
        "channel.stop",
    ):
        for imported in imports(modules()[name]):
            package = imported.partition(".")[0]
            assert package not in {"inference", "tools", "turn", "loopd"}, name
            # cli imports it inside the commands that read logs, and nowhere else
            assert package != "session" or name in {"bxctl.logs", "bxctl.cache", "bxctl.cli"}, name


def test_the_order_check_finds_an_import_that_goes_up(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text("def f():\n    from boxmaker.loopd import serve\n    import boxmaker.turn.loop\n")
    assert imports(file) == {"loopd.serve", "turn.loop"}


def test_the_judge_of_the_log_knows_nothing_of_the_code_that_wrote_it() -> None:
    found = imports(modules()["verify.judge"])
    assert [name for name in found if name in modules() or name.startswith("boxmaker")] == []
