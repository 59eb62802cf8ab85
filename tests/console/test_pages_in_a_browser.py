"""The console in a headless Chromium: each page in both themes and at two widths, live updates, keyboard, policy.

Tests wait for functions in a page, not for expressions. Playwright compiles an expression each time it looks, and the
policy of the pages forbids that after the first time.

Run by `make test-console`, which leaves a picture of each page in build/console.
"""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from console_world import COLD, PATIENT, World, load, streams, submit, world
from e2e_asking import until
from e2e_models import python
from e2e_server import serving

playwright = pytest.importorskip("playwright.sync_api")

PICTURES = Path(__file__).resolve().parents[2] / "build" / "console"
WIDTHS = {1280: 860, 390: 844}
PATIENCE_MS = 60_000


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world(tmp_path_factory.mktemp("world")) as made, load(made.server), streams(made.server):
        yield made


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        yield chromium
        chromium.close()


def request_path(job: str) -> str:
    digits, _, model = job.partition(".")
    return f"/requests/{model}/{digits}"


def paths(seen: World) -> dict[str, str]:
    return {
        "models": "/models",
        "model": "/models/moody",
        "jobs": "/jobs",
        "streams": "/streams",
        "request-queued": request_path(seen.queued),
        "request-cold": request_path(seen.cold),
        "request-poison": request_path(seen.poison),
        "request-innocent": request_path(seen.innocent),
        "dead-letters": "/dead-letters",
        "dead-letter": request_path(seen.poison).replace("requests", "dead-letters"),
        "problem": "/models/nothing",
        "overview": "/",  # the last one, as its plots are then the longest
    }


def plotted(seen: World) -> int:
    """How many points a plot of the overview begins with."""
    with urllib.request.urlopen(seen.console("/live?page=overview"), timeout=60) as live:
        assert live.readline() == b"event: update\n"
        told = json.loads(live.readline().removeprefix(b"data: "))
    return len(told["history"][0])


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_page(seen: World, browser: object, width: int, scheme: str) -> None:
    """No error, no refusal of the policy, nothing wider than the window; a picture of each."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    context = browser.new_context(viewport={"width": width, "height": WIDTHS[width]}, color_scheme=scheme)
    complaints: list[str] = []
    try:
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        for name, path in paths(seen).items():
            page.goto(seen.console(path))
            if name in ("overview", "models", "model", "jobs", "streams", "dead-letters"):
                page.wait_for_selector("#live[data-state=live]", timeout=PATIENCE_MS)
            if name == "streams":
                page.wait_for_selector("text=conversation 2", timeout=PATIENCE_MS)
            if name in ("overview", "model"):
                page.wait_for_selector("figure.chart canvas", timeout=PATIENCE_MS)
            if name == "overview":
                until("the plots have something to show", lambda: plotted(seen) > 6)
            wide = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
            assert wide <= 0, f"{name} is {wide} px wider than the window"
            page.screenshot(path=PICTURES / f"{name}-{width}-{scheme}.png", full_page=True)
            if name == "problem":
                complaints = [text for text in complaints if "404" not in text]
            assert not complaints, f"{name}: {complaints}"
    finally:
        context.close()


def test_stories_are_told(seen: World, browser: object) -> None:
    page = browser.new_page()
    told = {}
    for name, path in paths(seen).items():
        if name.startswith("request-"):
            page.goto(seen.console(path))
            told[name] = page.inner_text("main")
    page.close()
    assert "accepted before it were served first" in told["request-queued"]
    assert "cold load" in told["request-cold"]
    assert "Poison" in told["request-poison"]
    assert "it was tried again" in told["request-innocent"]


def test_figures_move_and_can_be_held(seen: World, browser: object) -> None:
    page = browser.new_page()
    page.goto(seen.console("/models/moody"))
    page.wait_for_selector("#live[data-state=live]", timeout=PATIENCE_MS)
    answered = "#model_versions tbody td:nth-child(6)"
    before = page.inner_text("#model_versions")
    page.wait_for_function("(before) => document.querySelector('#model_versions').innerText != before", arg=before)
    assert page.inner_text(answered)
    page.click("#hold")
    page.wait_for_selector("#live[data-state=held]")
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_is_accessible(seen: World, browser: object, scheme: str) -> None:
    """By the rules of axe for WCAG 2.2, levels A and AA: contrast, names, roles, what a keyboard reaches."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    options = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"], "resultTypes": ["violations"]}
    context = browser.new_context(viewport={"width": 1280, "height": WIDTHS[1280]}, color_scheme=scheme)
    found: list[str] = []
    try:
        page = context.new_page()
        for name, path in paths(seen).items():
            page.goto(seen.console(path))
            results = axe.Axe().run(page, options=options).response
            assert "color-contrast" in {one["id"] for one in results["passes"]}
            for one in results["violations"]:
                nodes = [f"{node['html'][:120]}: {node['failureSummary']}" for node in one["nodes"][:2]]
                found.append(f"{name}: {one['id']}, {len(one['nodes'])} times: {' '.join(nodes)}")
    finally:
        context.close()
    assert not found, "\n".join(found)


FOCUSABLE = """() => [...document.querySelectorAll(
    'a[href], button, input:not([type=hidden]), select, summary, [tabindex="0"]'
)].filter((one) => !one.disabled && one.checkVisibility())"""
NAMED = "(one) => one.id || one.getAttribute('aria-label') || one.getAttribute('href') || one.textContent.trim()"
RINGED = """(one) => {
    const style = getComputedStyle(one);
    const outlined = style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 2;
    const placed = one.getBoundingClientRect();
    return (outlined || style.boxShadow !== 'none') && placed.right > 0 && placed.bottom > 0;
}"""


def test_the_tab_key_reaches_everything_in_order_and_shows_where_it_is(seen: World, browser: object) -> None:
    page = browser.new_page()
    page.goto(seen.console("/dead-letters"))
    page.wait_for_selector("#live[data-state=live]", timeout=PATIENCE_MS)
    wanted = page.evaluate(f"({FOCUSABLE})().map({NAMED})")
    reached: list[str] = []
    for _ in wanted:
        page.keyboard.press("Tab")
        reached.append(page.evaluate(f"({NAMED})(document.activeElement)"))
        assert page.evaluate(f"({RINGED})(document.activeElement)"), (
            f"{reached[-1]} does not show that it has the focus"
        )
    assert reached == wanted
    assert {"#content", "hold", "theme"} <= set(reached)
    page.close()


def test_keyboard_and_theme(seen: World, browser: object) -> None:
    page = browser.new_page()
    page.goto(seen.console("/"))
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.url.endswith("#content")
    page.focus("#theme")
    page.keyboard.press("Enter")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.reload()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.close()


def test_a_job_is_found_by_its_id(seen: World, browser: object) -> None:
    page = browser.new_page()
    page.goto(seen.console("/"))
    page.fill("input[name=id]", seen.cold)
    page.keyboard.press("Enter")
    page.wait_for_url("**/requests/cold/*")
    assert "cold load" in page.inner_text("main")
    page.close()


def test_streams_are_live(seen: World, browser: object) -> None:
    page = browser.new_page()
    page.goto(seen.console("/streams"))
    counts = "[...document.querySelectorAll('#streams_table tbody td:nth-child(6)')].map((cell) => +cell.innerText)"
    page.wait_for_function(f"() => {counts}.length >= 2 && Math.min(...{counts}) > 0", timeout=PATIENCE_MS)
    before = page.evaluate(f"Math.max(...{counts})")
    page.wait_for_function(f"(before) => Math.max(...{counts}) > before", arg=before, timeout=PATIENCE_MS)
    page.close()


def test_the_page_of_a_waiting_request_changes_until_it_has_ended(seen: World, browser: object) -> None:
    page, other = browser.new_page(), browser.new_page()
    for one in (page, other):
        one.set_default_timeout(PATIENCE_MS)
    other.goto(seen.console("/models/patient"))
    other.click("text=Pause the queue")
    page.goto(seen.console(request_path(submit(seen.server, "patient", 1))))
    page.wait_for_selector("#live[data-state=live]")
    assert page.inner_text("#request_state") == "queued"
    page.focus("text=Cancel it")  # what has the focus goes too, when nothing is left to cancel
    other.click("text=Resume the queue")
    page.wait_for_selector("#live[data-state=ended]")
    assert page.inner_text("#request_state") == "succeeded"
    assert "Cancel it" not in page.inner_text("main")
    assert not page.is_visible("#hold")
    for one in (page, other):
        one.close()


def said(page: object, name: str) -> str:
    """The message of an action; a picture of its page."""
    page.wait_for_selector(".outcome, div.problem", timeout=PATIENCE_MS)
    wide = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
    assert wide <= 0, f"{name} is {wide} px wider than the window"
    page.screenshot(path=PICTURES / f"{name}.png", full_page=True)
    return page.inner_text(".outcome, div.problem")


@pytest.mark.parametrize(("width", "scheme", "scripts"), [(1280, "light", True), (390, "dark", False)])
def test_a_queue_is_edited(seen: World, browser: object, width: int, scheme: str, scripts: bool) -> None:
    """Pause, move, cancel and resume, with scripts and without."""
    at = f"{width}-{scheme}"
    size = {"width": width, "height": WIDTHS[width]}
    context = browser.new_context(viewport=size, color_scheme=scheme, java_script_enabled=scripts)
    complaints: list[str] = []
    try:
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        address = seen.console("/models/patient")
        page.goto(address)
        page.click("text=Pause the queue")
        assert "is paused: nothing more of it is dispatched" in said(page, f"action-paused-{at}")
        jobs = [submit(seen.server, "patient", number) for number in range(4)]
        page.goto(seen.console(request_path(jobs[3])))
        if scripts:
            page.wait_for_selector("#live[data-state=live]")
        assert "the queue is paused" in page.inner_text("main")
        page.screenshot(path=PICTURES / f"request-waiting-{at}.png", full_page=True)
        page.goto(address)
        page.click("text=The first of them")
        page.check(f"input[value='{jobs[0]}']")
        page.select_option("select[name=level]", "3")
        page.screenshot(path=PICTURES / f"action-queue-{at}.png", full_page=True)
        page.click("text=Move the chosen to level")
        assert said(page, f"action-moved-{at}").startswith("1 request moved to level 3.")
        if scripts:  # the first update is no older than the page
            page.wait_for_selector("#live[data-state=live]")
        assert re.search(r"^3\s+0\s+1\s", page.inner_text("#model_queue"), re.MULTILINE)
        page.click("text=The first of them")
        for job in jobs[1:3]:
            page.check(f"input[value='{job}']")
        page.click("text=Cancel the chosen")
        assert page.inner_text("h1") == "Cancel 2 requests?"
        page.screenshot(path=PICTURES / f"action-question-{at}.png", full_page=True)
        page.focus("text=Yes, cancel")
        page.keyboard.press("Enter")
        assert said(page, f"action-cancelled-{at}").startswith("2 requests cancelled.")
        page.click("text=Resume the queue")
        assert "is served again" in said(page, f"action-resumed-{at}")
        assert not complaints
    finally:
        context.close()


def test_a_model_is_unloaded_and_loaded_again(tmp_path: Path, browser: object) -> None:
    python(tmp_path / "models", "patient", COLD.replace("time.sleep(1)", "pass"), PATIENT)
    flags = ("--console-actions", "--model-control-mode=explicit", "--load-model=patient")
    page = browser.new_page(viewport={"width": 1280, "height": WIDTHS[1280]})
    page.set_default_timeout(PATIENCE_MS)
    with serving(tmp_path / "models", tmp_path / "state", *flags) as server:
        page.goto(f"http://{server.metrics}/console/models/patient")
        page.wait_for_selector("#live[data-state=live]")
        assert "READY" in page.inner_text("#model_versions")
        page.screenshot(path=PICTURES / "action-control-1280-light.png", full_page=True)
        page.click("text=Unload")
        assert page.inner_text("h1") == "Unload patient?"
        page.click("text=Yes, unload")
        assert re.search("is unloaded|asked to unload", said(page, "action-unloaded"))  # the latter after ten seconds
        page.wait_for_function("() => !document.querySelector('#model_versions').innerText.includes('READY')")
        assert server.get("/v2/models/patient/ready")[0] != 200
        page.click("#model_control button >> text=/^Load/")
        assert re.search("is loaded|asked to load", said(page, "action-loaded"))
        page.wait_for_function("() => document.querySelector('#model_versions').innerText.includes('READY')")
        assert server.get("/v2/models/patient/ready")[0] == 200
    page.close()


def test_dead_letters_are_submitted_again_and_discarded(seen: World, browser: object) -> None:
    page = browser.new_page()
    page.set_default_timeout(PATIENCE_MS)
    page.goto(seen.console("/dead-letters"))
    page.check("tbody input[name=id] >> nth=0")
    page.click("text=Submit the chosen ones again")
    assert said(page, "action-replayed").startswith("1 dead letter submitted again")
    page.click(".outcome a")
    page.wait_for_url("**/requests/moody/*")
    page.goto(seen.console(paths(seen)["dead-letter"]))
    page.click("text=Discard it")
    assert page.inner_text("h1") == "Discard 1 dead letter?"
    page.click("text=Yes, discard")
    assert said(page, "action-discarded") == "1 dead letter discarded."
    page.close()
