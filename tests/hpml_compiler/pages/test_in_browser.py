"""The page in a browser: it opens from disk, says nothing on the console, and a click opens a block."""
from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from hpml_compiler.pages.plan_page import write_page
from tests.helpers.plans import gpt_plan

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(BROWSER is None or shutil.which("dot") is None, reason="needs chromium and Graphviz's dot")
CLICK = ("document.querySelector('#overview g.node[id=g0_1]').dispatchEvent(new MouseEvent('click',{bubbles:true}));"
         "document.querySelectorAll('th.sorts')[4].click();"
         "document.title=document.querySelector('details[open] summary').textContent+' '"
         "+document.querySelector('table tbody td.number[data-value]').closest('table').rows.length;")


def dumped(page, folder):
    found = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}",
         "--enable-logging=stderr", "--dump-dom", f"file://{page}"], capture_output=True, text=True, timeout=60, check=True)
    return found.stdout, [line for line in found.stderr.splitlines() if "CONSOLE" in line]


def test_page_opens_without_errors_and_a_click_opens_a_block(tmp_path):
    page = write_page(gpt_plan(), tmp_path / "plan.html", ["hpml", "plan"])
    shown, console = dumped(page, tmp_path)
    assert not console and "<details data-node" in shown and "<details open" not in shown
    page.write_text(page.read_text().replace("</script></body>", CLICK + "</script></body>"))
    clicked, console = dumped(page, tmp_path)
    assert not console and re.search(r"<title>h\.0-2 x3 \d+</title>", clicked), re.findall("<title>[^<]*", clicked)[:1]
