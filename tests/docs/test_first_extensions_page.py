"""docs/guides/first_extensions.md is followed to the letter: its files, its command, its output."""
from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "guides" / "first_extensions.md").read_text(encoding="utf-8")
FILES = {name: text for text, name in re.findall(r"^```python\n(# (\w+\.py)\n.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)}


def test_it_takes_fewer_than_40_lines():
    code = [line for text in FILES.values() for line in text.splitlines() if line.strip() and not line.startswith("# ")]
    assert set(FILES) == {"my_ops.py", "my_pass.py", "first.py"}
    assert len(code) < 40, len(code)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("rule, split", [(True, "S(0)"), (False, "R")], ids=["with_the_rule", "without_it"])
def test_the_files_print_what_the_page_says(tmp_path, rule, split):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text if rule else text.split("\n\n\n@rule(")[0], encoding="utf-8")
    (command,) = re.findall(r"^```sh\n(.*)\n```$", TEXT, re.MULTILINE)
    (output,) = re.findall(r"^```text\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    done = subprocess.run([sys.executable, *command.split()[1:]], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout == output.replace("S(0)", split)
