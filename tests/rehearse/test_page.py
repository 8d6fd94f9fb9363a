"""The page: nothing in a report can become markup, it needs no network, and a browser can draw it."""

import html
import json
import re
import shutil
import subprocess

import pytest
from fake_rehearsal import fake_rehearsal

from jaxpar.rehearse.report.page import page_text, write_page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
EVIL = "</script><script>document.title='owned'</script><!--<img src=x onerror=alert(1)>@data@"


def data_of(page: str) -> dict:
    """The timeline that a page carries, found as a browser finds it: up to the first end of a script element."""
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script', page, re.DOTALL | re.IGNORECASE)
    return json.loads(text)


@pytest.mark.quick
def test_the_page_carries_the_timeline_and_every_row_of_the_tables(tmp_path):
    report = fake_rehearsal(layers=3)
    write_page(report, tmp_path / "report.html")
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert data_of(page) == report["timeline"]
    for part in ("Fits</b>", "memory of a device", "UNPLANNED", "activations", *report["command"].split()):
        assert part.lower() in page.lower(), part
    tables = page.partition('<section id="lines"')[2]
    for row in [*report["lines"], *report["collectives"]]:
        assert f"<td>{row['source']}</td>" in tables
    for row in report["shardings"]:
        assert f"<td>{row['name']}</td>" in tables


@pytest.mark.quick
def test_no_string_of_a_report_breaks_out():
    report = fake_rehearsal(layers=1, config=EVIL, notes=[EVIL], command=EVIL)
    report["lines"][0]["source"] = report["timeline"]["scopes"][0] = report["findings"][0]["message"] = EVIL
    report["memory"]["categories"]['"><script>'] = 2**30
    report["memory"]["categories"]["x; } body { display: none"] = 2**30
    page, plain = page_text(report), page_text(fake_rehearsal(layers=1))
    for tag in ("<script", "</script", "<!--", "<img"):
        assert page.lower().count(tag) == plain.lower().count(tag), tag
    assert data_of(page)["scopes"][0] == EVIL
    assert f"<title>{html.escape(EVIL)} on v5p-64</title>" in page
    assert f"<li>note: {html.escape(EVIL, quote=False)}</li>" in page
    assert not re.search(r'style="[^"]*[{}]', page)


@pytest.mark.quick
def test_the_page_asks_nothing_of_the_network_and_holds_all_its_parts():
    page = page_text(fake_rehearsal(layers=1))
    assert "default-src 'none'" in page
    assert not re.search(r"https?://|<link|\bsrc=|@import|url\(|fetch\(|XMLHttpRequest|innerHTML", page)
    assert not re.search(r"@(title|style|body|data|script)@", page)
    assert page.count('"use strict"') == 1


@pytest.mark.quick
def test_what_a_report_does_not_have_is_left_out():
    report = fake_rehearsal(layers=1, collectives=[], critical_path=[], shardings=[])
    report["memory"].update(fits=False, host={})
    del report["timeline"]
    page = page_text(report)
    assert ">Does not fit</b>" in page
    sections = re.findall(r'<section id="(\w+)"', page)
    assert sections == ["summary", "step", "memory", "lines", "findings", "notes"]


@pytest.mark.quick
def test_what_json_does_not_have_is_refused_rather_than_written():
    report = fake_rehearsal(layers=1)
    report["timeline"]["events"][0][1] = float("nan")
    with pytest.raises(ValueError, match="not JSON compliant"):
        page_text(report)


def drawn(report, folder) -> str:
    """The text of the page's document once a browser has run it."""
    write_page(report, folder / "report.html")
    address = f"file://{folder / 'report.html'}"
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=4000",
               f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr", "--dump-dom", address]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
    assert "CONSOLE" not in done.stderr, done.stderr
    return done.stdout.split("<script", 1)[0]


needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here to draw the page")


@needs_chromium
def test_a_browser_draws_the_timeline_without_a_complaint(tmp_path):
    text = drawn(fake_rehearsal(layers=4), tmp_path)
    height = int(re.search(r'<canvas id="lanes"[^>]*height: (\d+)px', text)[1])
    assert height > 6 * 30, "a row for each lane"
    legend = re.search(r'<p id="legend">(.*?)</p>', text, re.DOTALL)[1]
    assert "reduce-scatter" in legend and "matmul" in legend


@needs_chromium
def test_a_browser_shows_evil_strings_as_they_are(tmp_path):
    report = fake_rehearsal(layers=1, config=EVIL, notes=[EVIL])
    del report["timeline"]
    text = drawn(report, tmp_path)
    assert f"<h1>{html.escape(EVIL, quote=False)} on v5p-64</h1>" in text
    assert f"<li>note: {html.escape(EVIL, quote=False)}</li>" in text
