"""The campaign itself: it finds a planted fault, saves it small, names its file, and the file fails again by name."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz import __main__ as command
from tests.fuzz import targets
from tests.fuzz.campaign import PLAIN_ROUND, Found, make_smaller, run, save
from tests.fuzz.mutation import WAYS, changes, mutate
from tests.fuzz.target import MAX_INPUT_BYTES, Target, chunkings


def target(check: Callable[[bytes], str], grammar: st.SearchStrategy[bytes] | None = None) -> Target:
    """A target of no name that matters, whose inputs are made of two short ones."""
    return Target(
        name="planted",
        suffix=".bin",
        check=check,
        seeds=lambda: [b"abcdef", b'{"a":1}\n{"b":2}\n'],
        tokens=(b"X", b"null"),
        grammar=st.binary(max_size=6) if grammar is None else grammar,
    )


def ticks(step: float = 0.001) -> Callable[[], float]:
    """A clock that goes on by a step each time somebody looks."""
    seen = itertools.count()
    return lambda: next(seen) * step


def no_x(raw: bytes) -> str:
    assert b"X" not in raw
    return str(min(len(raw), 3))


def test_a_planted_fault_is_found_and_made_as_small_as_it_can_be() -> None:
    found = run(target(no_x), 1000.0, seed=1)
    assert found.failing == b"X"
    assert "assert b" in found.why
    assert "FAILED" in found.line()


def test_a_fault_that_only_plain_changes_come_upon_is_made_small_too() -> None:
    def check(raw: bytes) -> str:
        assert raw.count(b"X") < 2 or len(raw) < 8
        return "x" if b"X" in raw else "none"

    found = run(target(check, st.just(b"")), 1000.0, seed=1)
    assert found.failing is not None
    assert (len(found.failing), found.failing.count(b"X") >= 2) == (8, True)


def test_an_exception_of_any_class_is_a_find() -> None:
    def check(raw: bytes) -> str:
        raw.decode("ascii")
        return ""

    found = run(target(check), 1000.0, seed=1)
    assert found.failing is not None
    assert len(found.failing) == 1
    assert "UnicodeDecodeError" in found.why


def test_a_seed_that_fails_is_a_find_at_once() -> None:
    def check(raw: bytes) -> str:
        assert raw != b"abcdef"
        return ""

    found = run(target(check), 1000.0, seed=1)
    assert found.failing == b"abcdef"
    assert found.inputs == 1 + 2 + 6, "itself, and without three bytes, and without one"


def test_without_a_fault_the_campaign_ends_with_its_time_and_tells_what_it_tried() -> None:
    tried: list[bytes] = []

    def check(raw: bytes) -> str:
        tried.append(raw)
        return str(min(len(raw), 3))

    found = run(target(check), 1.0, seed=1, clock=ticks(), round_inputs=20)
    assert found.failing is None
    assert found.inputs == len(tried) > PLAIN_ROUND // 4
    assert found.seconds >= 1.0
    assert {kind: len(raw) for kind, raw in found.kinds.items()} == {"0": 0, "1": 1, "2": 2}, "3 is no new kind"
    assert re.fullmatch(r"planted +[\d,]+ inputs +1\.\d s +[\d,]+/s +3 new kinds  nothing found", found.line())


def test_the_same_seed_tries_the_same_inputs_and_another_one_others() -> None:
    def tried(seed: int) -> list[bytes]:
        inputs: list[bytes] = []

        def check(raw: bytes) -> str:
            inputs.append(raw)
            return ""

        run(target(check), 0.1, seed, clock=ticks(), round_inputs=20)
        return inputs

    assert tried(1) == tried(1)
    assert tried(1) != tried(2)


def test_an_input_of_a_new_kind_is_changed_further() -> None:
    """Three tokens do not come by chance in one input: each must be kept for the next."""

    def check(raw: bytes) -> str:
        depth = re.match(rb"(X(?:null(?:X(?:null)?)?)?)?", raw)
        assert depth is not None
        assert depth[0] != b"XnullXnull"
        return depth[0].decode()

    assert run(target(check), 1000.0, seed=3, round_inputs=20).failing == b"XnullXnull"


def test_what_is_left_of_an_input_fails_and_no_part_of_it_can_go() -> None:
    def check(raw: bytes) -> None:
        assert not (b"a" in raw and b"z" in raw)

    assert make_smaller(b"0123a4567z89" * 3, check) in (b"az", b"za")


def test_a_find_is_saved_named_and_fails_again_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(targets.TARGETS, "planted", target(no_x))
    status = command.main(["--seconds", "1000", "--seed", "1", "--target", "planted", "--build", str(tmp_path)])
    said = capsys.readouterr().out
    assert status == 1
    told = re.search(r"again: python -m tests\.fuzz (\S+)", said)
    assert told is not None
    file = Path(told[1])
    assert file.parent == tmp_path / "planted"
    assert file.read_bytes() == b"X"
    assert command.main([str(file)]) == 1
    assert "AssertionError" in capsys.readouterr().out
    file.write_bytes(b"y")
    assert command.main([str(file)]) == 0
    assert capsys.readouterr().out == f"{file}: 1\n"


def test_a_file_of_no_target_is_a_wrong_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([str(tmp_path / "x.bin")]) == 2
    assert "named for no target (frames, sse, completion, records, config)" in capsys.readouterr().err


def test_every_real_target_runs_through_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    """All their strategies can be built, and the report has a line for each."""
    assert command.main(["--seconds", "0.05", "--seed", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["frames", "sse", "completion", "records", "config"]
    assert all("nothing found" in line for line in lines[1:])


def test_saving_the_same_input_twice_makes_one_file_and_another_one_a_second(tmp_path: Path) -> None:
    first = save(b"a", tmp_path / "new", "kind", ".bin")
    assert save(b"a", tmp_path / "new", "kind", ".bin") == first == tmp_path / "new" / "kind.bin"
    second = save(b"b", tmp_path / "new", "kind", ".bin")
    assert second.name.startswith("kind~")
    assert (first.read_bytes(), second.read_bytes()) == (b"a", b"b")
    assert target(no_x).kind_of_file(second.name) == target(no_x).kind_of_file(first.name) == "kind"


def test_a_report_without_time_has_no_rate() -> None:
    assert " 0/s " in Found(target="planted").line()


@given(st.binary(max_size=60), changes, st.lists(st.binary(max_size=20), min_size=1, max_size=3))
def test_a_change_can_be_made_to_any_input(
    raw: bytes, made: list[tuple[str, int, int, int]], pool: list[bytes]
) -> None:
    changed = mutate(raw, made, pool, [b"X", b""])
    assert len(changed) <= MAX_INPUT_BYTES
    assert mutate(raw, made, pool, [b"X", b""]) == changed


@pytest.mark.parametrize(
    ("change", "made"),
    [
        (("value", 1, 0, 0), b'{"a":X}\nbc'),
        (("token", 1, 0, 0), b'{Xa":1}\nbc'),
        (("insert", 2, 9, 0), b'{"Xa":1}\nbc'),
        (("overwrite", 2, 9, 0), b'{"X":1}\nbc'),
        (("flip", 0, 9, 1), b'y"a":1}\nbc'),
        (("byte", 0, 0, 255), b'\xff{"a":1}\nbc'),
        (("truncate", 3, 9, 0), b'{"a'),
        (("behead", 8, 9, 0), b"bc"),
        (("drop", 1, 9, 0), b"{c"),
        (("repeat", 8, 9, 0), b'{"a":1}\nbbc'),
        (("many", 8, 9, 0), b'{"a":1}\n' + b"b" * 11 + b"bc"),
        (("splice", 1, 1, 1), b"{56789"),
        (("graft", 1, 1, 1), b'{56"a":1}\nbc'),
        (("swap", 8, 10, 1), b'{"a":1}\ncb'),
        (("lines", 0, 1, 0), b'bc\n{"a":1}'),
        (("again", 0, 1, 0), b'bc\n{"a":1}\nbc'),
    ],
)
def test_each_way_of_changing_does_what_its_name_says(change: tuple[str, int, int, int], made: bytes) -> None:
    assert mutate(b'{"a":1}\nbc', [change], [b"?", b"456789"], [b"X"]) == made


def test_no_way_is_left_out_above() -> None:
    mark = next(m for m in test_each_way_of_changing_does_what_its_name_says.pytestmark if m.name == "parametrize")  # type: ignore[attr-defined]  # pytest puts it there
    assert {change[0] for change, _ in mark.args[1]} == set(WAYS)


@given(st.binary(max_size=700))
def test_every_way_of_cutting_gives_all_bytes_and_is_the_same_each_time(raw: bytes) -> None:
    cuts = list(chunkings(raw))
    assert cuts[0] == [raw]
    assert all(b"".join(pieces) == raw for pieces in cuts)
    assert cuts == list(chunkings(raw))
