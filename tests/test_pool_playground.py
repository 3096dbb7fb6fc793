"""The playground in a real browser, against a real server whose state the test can see. Skipped where Chromium or Playwright is missing."""
import json
import re
import time
import urllib.error
import urllib.request

import pytest
from pool_faults import HANG, HOUR, until

from xland_minigrid.pool import EnvPool, EnvServer
from xland_minigrid.pool.client import IOThread
from xland_minigrid.pool.playground import page as playground

pytestmark = pytest.mark.newest

TOKEN = "sesame?open~yourself/+=>"
TO_THE_GOAL = ("forward", "forward", "turn clockwise", "forward", "forward")     # in the empty room of 5 by 5 the agent begins in one corner, the goal is in the other


@pytest.fixture(scope="module")
def io():
    io = IOThread("test-server")
    yield io
    io.stop()


def served(io, **more):
    server = io.wait(EnvServer(env="MiniGrid-Empty-5x5", slots=2, token=TOKEN, grace=0.08, **more).start())
    server.host.grace = HOUR                                 # a page that was cut off may take its time to come back
    return server


@pytest.fixture(scope="module")
def server(io):
    server = served(io, playground=True)
    yield server
    io.wait(server.stop(0))


@pytest.fixture(autouse=True)
def all_free_afterwards(request):
    "Whatever a test did, its connections end with it, and its places are free at the end of the grace."
    yield
    if "server" in request.fixturenames:
        host, io = request.getfixturevalue("server").host, request.getfixturevalue("io")
        assert until(lambda: not any(seat.attached for seat in list(host.seats.values())))
        io.loop.call_soon_threadsafe(host.reap, time.monotonic() + 1.1 * HOUR)
        assert until(lambda: not host.seats)


@pytest.fixture
def tab(browser, server):
    "Opens pages, which fail the test if a script on them fails or if they ask for anything from elsewhere, or put the token into an address."
    opened, wrong, asked = [], [], []

    def open_tab(fragment="", url=server.url, **settings):
        context = browser.new_context(**settings)
        page = context.new_page()
        page.set_default_timeout(1000 * HANG)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.on("websocket", lambda socket: asked.append(socket.url))
        page.goto(url.replace("ws", "http", 1) + "/play" + fragment)
        opened.append(context)
        return page

    yield open_tab
    for context in opened:
        context.close()
    assert wrong == []
    assert [url for url in asked if not url.startswith(("http://127.0.0.1:", "ws://127.0.0.1:", "data:"))] == []
    assert not any("sesame" in url.partition("#")[0] or "token" in url.partition("#")[0] for url in asked)


def entered(tab, seed=1, **settings):
    page = tab(f"#token={urllib.request.quote(TOKEN)}&seed={seed}", **settings)
    page.wait_for_selector("body[data-drawn='0']")
    return page


def seat(server):
    (only,) = [s for s in server.host.seats.values() if s.backend is server.host.backends["playground"]]
    return only


def act(page, name):
    page.get_by_role("button", name=name, exact=True).click()


def said(page, words):
    page.locator("#said", has_text=words).wait_for()


def test_an_episode_to_the_goal_by_clicking(tab, server):
    page = entered(tab)
    for n, name in enumerate(TO_THE_GOAL, 1):
        act(page, {"forward": "move forward"}.get(name, name))
        page.wait_for_selector(f"body[data-n='{n}']")
        assert seat(server).n == n
    page.locator("#result", has_text="Goal reached in 5 steps.").wait_for()
    slots = server.host.backends["playground"].slots
    reward = float(slots._store.timestep.reward[seat(server).place.slot])
    assert reward > 0.9 and page.locator("#reward").inner_text() == f"{reward:.3f}"
    assert not seat(server).running and page.locator("#n").inner_text() == "5"
    assert page.locator("#trials li").all_inner_texts() == [f"1 · ✓ 5 steps · {reward:.3f}"]

    act(page, "move forward")                                # nothing is sent, and the page says what to do
    page.locator("#result", has_text="The trial is over: start another one.").wait_for()
    assert seat(server).n == 5
    page.keyboard.press("n")
    page.wait_for_selector("body[data-n='0']")
    for key in ("ArrowUp", "w", "d", "ArrowUp", "W"):        # faster than replies come: none is lost, none is doubled
        page.keyboard.press(key)
    page.locator("#trials li").nth(1).wait_for()
    assert seat(server).n == 5 and seat(server).episodes == 2


def test_the_picture_follows_and_the_task_waits_until_it_is_asked_for(tab, server):
    page = entered(tab)
    first = page.locator("#world").get_attribute("src")
    act(page, "turn clockwise")
    page.wait_for_selector("body[data-drawn='1']")
    assert first.startswith("data:image/png;base64,") and page.locator("#world").get_attribute("src") != first
    assert "after 1 steps" in page.locator("#world").get_attribute("alt")
    assert "green goal" not in page.content()
    page.get_by_role("button", name="Show the task").click()
    page.get_by_text("Reach the green goal.").wait_for()
    page.get_by_role("button", name="Hide the task").click()
    assert "green goal" not in page.content()


def test_every_control_has_a_name_and_fits_a_narrow_screen(tab):
    page = entered(tab, viewport=dict(width=400, height=800), color_scheme="dark")
    for control in page.locator("button:visible, input:visible").all():
        assert control.evaluate("e => e.ariaLabel || e.innerText.trim() || e.labels[0].innerText.trim()")
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(14, 17, 22)"
    page.keyboard.press("ArrowUp")
    page.wait_for_selector("body[data-n='1']")
    page.locator("#seed").fill("7")
    page.locator("#seed").press("w")                         # a letter in a field is a letter
    assert page.locator("#n").inner_text() == "1"
    page.locator("#seed").fill("4294967296")                 # what the server refuses is said, and the trial goes on
    page.get_by_role("button", name="Start").click()
    said(page, "seed is 4294967296")
    act(page, "toggle")
    page.wait_for_selector("body[data-n='2']")


def test_a_wrong_token_is_refused_in_words_and_the_right_one_lets_in(tab, server):
    page = tab("#token=wrong")
    said(page, "The server does not accept this token.")
    assert not server.host.seats and page.url.endswith("/play")       # the fragment is gone from the address
    page.get_by_label("Token").fill(TOKEN)
    page.get_by_role("button", name="Connect", exact=True).click()
    page.wait_for_selector("body[data-drawn='0']")
    page.reload()                                            # the tab remembers; the old place is free in time for the new session
    page.wait_for_selector("body[data-drawn='0']")
    said(tab(), "The server wants a token.")


def test_a_full_pool_keeps_nobody_from_playing_and_a_full_playground_nobody_from_the_pool(tab, server):
    with EnvPool.connect(server.url, size=2, token=TOKEN).sync as pool:
        page = entered(tab)
        act(page, "move forward")
        page.wait_for_selector("body[data-n='1']")
        assert [step.n for step in pool.reset_group(3)] == [0, 0]
        other = tab(f"#token={urllib.request.quote(TOKEN)}")
        said(other, "Somebody is playing already")
        page.goto("about:blank")                             # the first visitor leaves
        other.wait_for_selector("body[data-state=open]")
        assert [step.n for step in pool.run_group_step([0, 0])] == [1, 1]
    with EnvPool.connect(server.url, size=2, token=TOKEN).sync as pool:      # the playground is taken, and the pool has all its places
        assert seat(server) and [step.n for step in pool.reset_group(3)] == [0, 0]


def test_after_a_cut_it_is_the_same_world_at_the_same_step(tab, server, io):
    page = entered(tab)
    act(page, "move forward")
    page.wait_for_selector("body[data-drawn='1']")
    before = page.locator("body").get_attribute("data-session")
    io.loop.call_soon_threadsafe(seat(server).socket.transport.abort)
    page.wait_for_selector("body:not([data-state=open])")
    page.wait_for_selector("body[data-state=open]")
    assert page.locator("body").get_attribute("data-session") == before
    said(page, "same world, same step")
    act(page, "turn clockwise")
    page.wait_for_selector("body[data-n='2']")
    assert seat(server).n == int(page.locator("#n").inner_text())


def test_a_session_that_the_server_ended_says_why(tab, server, io):
    page = entered(tab)

    async def end():
        idle = seat(server)
        server.host.release(idle, "idle")
        await idle.socket.close(4002, "idle")

    io.wait(end())
    said(page, "Nothing happened for a while")
    page.get_by_role("button", name="Connect again").click()
    page.wait_for_selector("body[data-state=open]")


@pytest.mark.slow
def test_a_server_that_goes_away_and_comes_back_is_found_again(tab, io):
    server = served(io, playground=True)
    port = int(server.url.rpartition(":")[2])
    page = tab(f"#token={urllib.request.quote(TOKEN)}", url=server.url)
    page.wait_for_selector("body[data-drawn='0']")
    io.wait(server.stop(0))
    page.wait_for_selector("body[data-state=waiting]")
    server = served(io, playground=True, port=port)
    try:
        page.wait_for_selector("body[data-state=open]")
        said(page, "the old world is gone")
    finally:
        io.wait(server.stop(0))


# Without a browser -------------------------------------------------------------------------------------------------------------------

def test_the_page_needs_nothing_from_elsewhere():
    text = playground()
    assert text.startswith("<!doctype html>") and text.endswith("</html>\n") and len(text) < 40_000
    assert not re.search(r'(?:src|href)="(?!data:)|\burl\(|@import|\beval\(|\bFunction\(|innerHTML|localStorage', text)
    assert text.count("<script>") == text.count("</script>") == 1


def test_it_is_off_unless_asked_for(io):
    server = served(io)
    try:
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(server.url.replace("ws", "http", 1) + "/play")
        assert "playground" not in server.host.backends
    finally:
        io.wait(server.stop(0))


def test_the_page_is_served_with_a_policy_that_forbids_everything_else(server):
    with urllib.request.urlopen(server.url.replace("ws", "http", 1) + "/play") as answer:
        assert answer.read().decode() == playground()
        policy = dict(part.split(" ", 1) for part in answer.headers["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'" and policy["img-src"] == "data:"


def test_only_the_playground_draws_pictures(server, io):
    "What an agent may see is the observation."
    async def first_render(env):
        from websockets.asyncio.client import connect
        address = server.url + "/session" + (f"?env={env}" if env else "")
        async with connect(address, additional_headers={"Authorization": f"Bearer {TOKEN}"}, proxy=None) as ws:
            await ws.recv()
            replies = []
            for number, op in enumerate(("reset", "render"), 1):
                await ws.send(json.dumps({"id": number, "op": op, "value": None}))
                replies.append(json.loads(await ws.recv()))
            await ws.send(json.dumps({"id": 3, "op": "close"}))
            return replies[-1]

    assert io.wait(first_render("playground"))["png"]
    refused = io.wait(first_render(None))
    assert not refused["ok"] and refused["error"]["code"] == "bad_request" and "png" not in refused
