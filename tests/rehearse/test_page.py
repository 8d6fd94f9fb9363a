"""The page: nothing in a report can become markup, it is small, needs no network, and a browser can draw it."""

import html
import json
import re
import shutil
import subprocess

import pytest
from fake_rehearsal import fake_rehearsal

from jaxpar.rehearse.report.page import SCRIPTS, page_text, write_page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
EVIL = "</script><script>document.title='owned'</script><!--<img src=x onerror=alert(1)>@data@"


def data_of(page: str) -> dict:
    """The report that a page carries, found as a browser finds it: up to the first end of a script element."""
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script', page, re.DOTALL | re.IGNORECASE)
    return json.loads(text)


def unpacked(timeline: dict) -> list[tuple]:
    """The page's events as (lane, start, duration, instruction, repeats), microseconds."""
    events = []
    for lane, flat in enumerate(timeline["packed"]):
        repeats, now = dict(timeline["repeats"][lane]), 0
        for i in range(0, len(flat), 3):
            start = now + flat[i]
            now = start + flat[i + 1]
            events.append((lane, start / 1e3, flat[i + 1] / 1e3, flat[i + 2], repeats.get(i // 3, 0)))
    return events


@pytest.mark.quick
def test_the_page_carries_the_report_and_its_events_to_the_nanosecond(tmp_path):
    report = fake_rehearsal(layers=3)
    report["timeline"]["events"] += [[0, 1e6, 250.5, 0, 29], [5, 1e6 + 3, 0.0004, 1, 0]]
    write_page(report, tmp_path / "report.html")
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]
    found = data_of((tmp_path / "report.html").read_text(encoding="utf-8"))
    timeline = found.pop("timeline")
    assert found == {key: value for key, value in report.items() if key != "timeline"}
    events = sorted(map(tuple, report["timeline"]["events"]))
    for event, expected in zip(sorted(unpacked(timeline)), events, strict=True):
        assert event == pytest.approx(expected, abs=6e-4)


@pytest.mark.quick
def test_no_string_of_a_report_breaks_out():
    report = fake_rehearsal(layers=1, config=EVIL, notes=[EVIL])
    report["lines"][0]["source"] = report["timeline"]["scopes"][0] = report["findings"][0]["message"] = EVIL
    page, plain = page_text(report), page_text(fake_rehearsal(layers=1))
    for tag in ("<script", "</script", "<!--", "<img"):
        assert page.lower().count(tag) == plain.lower().count(tag), tag
    assert data_of(page)["notes"] == [EVIL]
    assert f"<title>{html.escape(EVIL)} on v5p-64</title>" in page


@pytest.mark.quick
def test_the_page_asks_nothing_of_the_network_and_holds_all_its_parts():
    page = page_text(fake_rehearsal(layers=1))
    assert "default-src 'none'" in page
    assert not re.search(r"https?://|<link|\bsrc=|@import|url\(|fetch\(|XMLHttpRequest|innerHTML", page)
    assert set(re.findall(r"^@(\w+)@$", page, re.MULTILINE)) == set()
    assert page.count('"use strict"') == 1
    assert SCRIPTS[-1] == "main"


@pytest.mark.quick
def test_a_hundred_thousand_events_take_little_more_than_a_megabyte():
    report = fake_rehearsal(layers=1700)
    size, count = len(page_text(report)), len(report["timeline"]["events"])
    assert count > 90_000
    assert size < 15 * count


@pytest.mark.quick
def test_what_json_does_not_have_is_refused_rather_than_written():
    report = fake_rehearsal(layers=1)
    report["time"]["mfu"] = float("nan")
    with pytest.raises(ValueError, match="not JSON compliant"):
        page_text(report)


def drawn(report, folder, view: str = "") -> str:
    """The text of the page's document once a browser has run it."""
    write_page(report, folder / "report.html")
    address = f"file://{folder / 'report.html'}{view}"
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=4000",
               f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr", "--dump-dom", address]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
    assert "CONSOLE" not in done.stderr, done.stderr
    return done.stdout.split("<script", 1)[0]


needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here to draw the page")


@needs_chromium
def test_a_browser_draws_every_section_without_a_complaint(tmp_path):
    text = drawn(fake_rehearsal(layers=4), tmp_path)
    assert ">Fits</b>" in text
    assert text.count("<section") == 9
    assert "hidden" not in "".join(re.findall(r"<section[^>]*>", text))
    assert re.search(r'badge bad">unplanned', text)
    assert "models/llama.py:133" in text


@needs_chromium
def test_the_stalls_that_a_browser_finds_in_the_events_are_those_of_the_report(tmp_path):
    report = fake_rehearsal(layers=4)
    text = drawn(report, tmp_path, "#t=0-10&q=waits%20for")
    waits = 1e3 * (report["time"]["exposed_communication"] + report["time"]["host_stall"])
    found = re.search(r'<output id="found">([\d,]+) events, ([\d.]+) ms over all lanes</output>', text)
    assert float(found[2]) == pytest.approx(waits, rel=5e-3)


@needs_chromium
def test_a_browser_shows_evil_strings_as_they_are(tmp_path):
    report = fake_rehearsal(layers=1, config=EVIL, notes=[EVIL], collectives=[], critical_path=[], shardings=[])
    report["memory"]["fits"] = False
    del report["timeline"]
    text = drawn(report, tmp_path)
    assert f'<h1 id="title">{html.escape(EVIL, quote=False)} on v5p-64</h1>' in text
    assert f"<li>{html.escape(EVIL, quote=False)}</li>" in text
    assert ">Does not fit</b>" in text
    hidden = re.findall(r'<section id="(\w+)"[^>]* hidden', text)
    assert hidden == ["timeline", "collectives", "critical", "shardings"]
