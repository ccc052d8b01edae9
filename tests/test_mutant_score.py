"""The score of a run of mutmut, from the files that it leaves."""

from __future__ import annotations

import json
from pathlib import Path

from tests.mutant_score import report


def test_each_module_and_all_together_have_a_line_and_what_was_missed_a_name(tmp_path: Path) -> None:
    statuses = {
        "src/a.py": {"a.x_f__mutmut_1": 1, "a.x_f__mutmut_2": 0, "a.x_f__mutmut_3": 36, "a.x_f__mutmut_4": 3},
        "src/p/b.py": {"p.b.x_g__mutmut_1": None, "p.b.x_g__mutmut_2": 33, "p.b.x_g__mutmut_3": 1},
        "src/none.py": {},
    }
    for name, by_key in statuses.items():
        file = tmp_path / f"{name}.meta"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"exit_code_by_key": by_key}))
    head, *lines = report(tmp_path).splitlines()
    assert head.split() == ["total", "killed", "timeout", "survived", "not", "run", "found"]
    assert [line.split() for line in lines] == [
        ["src/a.py", "4", "2", "1", "1", "0", "75.0%"],
        ["src/p/b.py", "3", "1", "0", "0", "2", "33.3%"],
        ["all", "7", "3", "1", "1", "2", "57.1%"],
        [],
        ["survived:", "a.x_f__mutmut_2"],
        ["not", "run:", "p.b.x_g__mutmut_1"],
        ["not", "run:", "p.b.x_g__mutmut_2"],
    ]
