"""Rows, their table and their JSON; the runner; and that the measuring programs run. No time is asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.__main__ import NAMES, main, run
from benchmarks.bench import Row, as_json, interleaved, ratios, row, table
from benchmarks.client import post_body, run_turn
from benchmarks.many import _Arrivals, _Reader, run_many
from benchmarks.processes import home, loopd, many_slots, stamp_server
from benchmarks.sessions import conversation, prepare_sessions, write_session

THREE = [
    Row(name="first", unit="trees", value=2, goal=1.5, values=(1, 2, 3), note="in spring"),
    Row(name="second one", unit="µs", value=1234.5, goal=None, values=(1234.5,)),
    Row(name="third", unit="trees", value=1.5, goal=1.5, values=(1.5, 12.34)),
]


def test_a_row_is_the_median_of_its_values() -> None:
    assert row("a", "b", [3, 1, 8]) == Row(name="a", unit="b", value=3, goal=None, values=(3, 1, 8), note="")
    assert row("a", "b", [1, 2], goal=9, note="n") == Row(
        name="a", unit="b", value=1.5, goal=9, values=(1, 2), note="n"
    )


def test_a_goal_is_met_when_the_figure_is_not_above_it() -> None:
    assert [one.met for one in THREE] == [False, None, True]


def test_the_table_has_a_line_a_row_and_each_note_below_its_row() -> None:
    assert table(THREE).split("\n") == [
        "figure      unit   goal   median  met  all values",
        "----------  -----  -----  ------  ---  --------------",
        "first       trees  ≤ 1.5  2.00    NO   1.00 2.00 3.00",
        "    in spring",
        "second one  µs     –      1,234   –    1,234",
        "third       trees  ≤ 1.5  1.50    yes  1.50 12.3",
    ]


def test_the_json_has_every_field_and_whether_the_goal_is_met() -> None:
    found = json.loads(as_json(THREE))
    assert found[0] == {
        "name": "first", "unit": "trees", "value": 2, "goal": 1.5, "values": [1, 2, 3],
        "note": "in spring", "met": False,
    }  # fmt: skip
    assert [one["met"] for one in found] == [False, None, True]
    assert found[1]["unit"] == "µs"


def test_ratios_are_taken_pair_by_pair() -> None:
    assert ratios([6, 10], [3, 2]) == [2, 5]
    with pytest.raises(ValueError, match="longer"):
        ratios([1], [1, 2])


def test_works_take_turns_and_every_other_round_goes_backwards() -> None:
    called: list[str] = []

    def work(name: str) -> float:
        called.append(name)
        return len(called)

    values = interleaved(3, lambda: work("a"), lambda: work("b"))
    assert called == ["a", "b", "b", "a", "a", "b"]
    assert values == [[1, 4, 5], [2, 3, 6]]


def test_a_benchmark_that_fails_does_not_stop_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    def broken(_: bool) -> list[Row]:
        raise ValueError("no measure")

    rows, failed = run({"one": lambda _: THREE[:1], "broken": broken, "three": lambda quick: THREE[2:] * quick}, True)
    assert rows == [THREE[0], THREE[2]]
    assert failed == ["broken"]
    assert "ValueError: no measure" in capsys.readouterr().err


def test_an_unknown_benchmark_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["nothing"])
    assert f"no such benchmark: nothing; there are {', '.join(NAMES)}" in capsys.readouterr().err


def test_the_runner_prints_the_table_and_writes_the_same_rows_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "new" / "bench.json"
    assert main(["resume", "--quick", "--json", str(file)]) == 0
    written = [
        Row(**{key: value for key, value in one.items() if key != "met"}) for one in json.loads(file.read_text())
    ]
    assert [one.name for one in written] == ["cold resume, 1,003 records"]
    assert capsys.readouterr().out == f"{table(written)}\n"


def test_a_body_of_a_wanted_size_has_that_size_and_asks_for_one_piece() -> None:
    body = post_body(1_000)
    assert len(body) == 1_000
    assert json.loads(body)["messages"][0]["content"].endswith("xbench:1:0")


def _event(number: int) -> bytes:
    return b'\0\0\0\x10{"v":1,"body":{"event":{"type":"content","text":"w100#%d;"}}}' % number


def test_an_event_out_of_its_order_is_told_however_the_reads_are_cut() -> None:
    data = _event(0) + _event(1)
    for cut in range(len(data)):
        reader, arrivals = _Reader(), _Arrivals()
        for piece in (data[:cut], data[cut:]):
            arrivals.take(reader, piece, 107)
        assert arrivals.late_ns == [7, 7]
        with pytest.raises(AssertionError, match="event 3 came where 2 should have"):
            arrivals.take(reader, _event(3), 107)


@pytest.mark.real
def test_a_turn_of_the_stamping_server_says_when_it_was_read_and_written() -> None:
    with home() as directory, stamp_server() as server:
        write_session(prepare_sessions(directory), "long", conversation(8))
        with loopd(directory, server.url) as daemon:
            times = run_turn(daemon.socket, "long", "bench:3:1000", resume=True)
            assert len(times.delays_ns) == 3
            assert min(times.delays_ns) > 0
            assert times.sent_ns < times.read_ns < times.last_written_ns < times.done_ns
            assert times.body_bytes > 8 * 100
    assert not directory.exists()
    assert daemon.process.returncode is not None


@pytest.mark.real
def test_a_daemon_of_many_slots_runs_turns_at_the_same_time() -> None:
    with home() as directory, stamp_server(3) as server, loopd(directory, server.url, many_slots(3)) as daemon:
        # the server begins no reply before all three are asked for: with one slot this would never end
        measured = run_many(daemon.socket, daemon.process.pid, server.process.pid, 3, "s", 4)
    assert (measured.turns, measured.events) == (3, 12)
