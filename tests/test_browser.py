"""The player in a real browser. Skipped where Chromium or Playwright is missing: neither is needed to use the package."""
from types import SimpleNamespace

import numpy as np
import pytest

from xland_minigrid.viz import play, render

pytestmark = pytest.mark.newest


@pytest.fixture
def page(browser):
    "A page that fails the test if anything on it goes wrong, or if it asks for anything from outside."
    page, wrong = browser.new_page(), []
    page.set_default_timeout(120_000)  # only ends a hang
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: None if request.url.startswith(("file:", "data:")) else wrong.append(request.url))
    yield page
    page.close()
    assert wrong == []


def film(length=12, tile_size=8):
    floor = np.full((6, 14), 0x39, np.uint8)
    return np.stack([render(floor, SimpleNamespace(position=(3, t), direction=1), tile_size=tile_size) for t in range(length)])


@pytest.fixture
def player():
    labels, values = ["red ball", "blue star", "green key"], np.linspace([.2, .3, .5], [.9, .1, 0], 12)
    return play(film(), [f"caption {t}" for t in range(12)], dict(labels=labels, values=values, sprites=[(5, 3), (14, 5), (9, 4)], truth=0, top=2),
                markers={0: "trial 1", 7: "trial 2"}, fps=20, tile_size=8)


def open_page(page, tmp_path, *players):
    path = tmp_path / "page.html"
    players[0].save(path)
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("</html>", "".join(p._repr_html_() for p in players[1:]) + "</html>"), encoding="utf-8")
    page.goto(path.as_uri())
    page.wait_for_function("n => document.querySelectorAll('.xmg[data-frame]').length == n", arg=len(players))
    return page.locator(".xmg")


def frame(element):
    return int(element.get_attribute("data-frame"))


def pixels(page, index=0):
    "What the canvas shows, (H, W, 3)."
    flat, h, w = page.evaluate("""i => { const c = document.querySelectorAll('.xmg canvas')[i];
        return [Array.from(c.getContext('2d').getImageData(0, 0, c.width, c.height).data), c.height, c.width]; }""", index)
    return np.array(flat, np.uint8).reshape(h, w, 4)[..., :3]


def test_buttons_and_slider_move_the_frame(page, tmp_path, player):
    root = open_page(page, tmp_path, player).first
    assert frame(root) == 0 and (pixels(page) == player.frames[0]).all()
    for _ in range(3):
        root.get_by_label("step forward").click()
    root.get_by_label("step back").click()
    assert frame(root) == 2 and root.locator(".xmg-count").inner_text() == "3 / 12"
    assert (pixels(page) == player.frames[2]).all()
    root.get_by_label("frame").fill("9")
    assert frame(root) == 9 and root.locator(".xmg-note").inner_text() == "caption 9"
    assert (pixels(page) == player.frames[9]).all()
    root.get_by_label("trial 2").click()
    assert frame(root) == 7 and (pixels(page) == player.frames[7]).all()
    assert root.get_by_label("trial 2").get_attribute("aria-current") == "true"


def test_keys_move_the_frame(page, tmp_path, player):
    root = open_page(page, tmp_path, player).first
    root.locator("canvas").click()
    for key, wanted in (("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("End", 11), ("Home", 0), ("ArrowLeft", 0), ("Control+ArrowRight", 0)):
        page.keyboard.press(key)
        assert frame(root) == wanted
    root.get_by_label("frame").press("ArrowRight")
    assert frame(root) == 1, "the slider moves by one, not by two"
    root.locator("canvas").click()
    page.keyboard.press(" ")
    root.get_by_label("pause").wait_for()
    page.keyboard.press(" ")
    root.get_by_label("play").wait_for()


def test_columns_have_their_names(page, tmp_path):
    wide = np.concatenate([film()] * 2, axis=2)
    root = open_page(page, tmp_path, play(wide, ["left words\tright words"] * 12, names=["<one>", "two"], tile_size=8)).first
    middle = root.locator("canvas").bounding_box()["x"] + root.locator("canvas").bounding_box()["width"] / 2
    for left, right in (("<one>", "two"), ("left words", "right words")):
        boxes = [root.get_by_text(words, exact=True).bounding_box() for words in (left, right)]
        assert boxes[0]["x"] + boxes[0]["width"] <= middle + 10 and middle <= boxes[1]["x"] + 10 and boxes[0]["y"] == boxes[1]["y"]


def test_play_runs_to_the_end_and_pauses(page, tmp_path, player):
    "By the page's clock, which stands still but where it is told to go on: 20 frames are a second."
    page.clock.install(time=0)
    root = open_page(page, tmp_path, player).first
    page.clock.pause_at(1_000_000)
    root.get_by_label("play").click()
    page.clock.run_for(160)
    assert frame(root) == 3
    root.get_by_label("pause").click()
    page.clock.run_for(10_000)
    assert frame(root) == 3
    root.get_by_label("speed").select_option("4")
    root.get_by_label("play").click()
    page.clock.run_for(60)
    assert frame(root) == 7
    page.clock.run_for(10_000)
    assert frame(root) == 11 and (pixels(page) == player.frames[-1]).all()
    root.get_by_label("play").wait_for()


def test_bars_follow_the_frame(page, tmp_path, player):
    root = open_page(page, tmp_path, player).first
    rows = lambda: [row.inner_text().split("\n") for row in root.locator(".xmg-row").all()]
    assert [r[0] for r in rows()] == ["green key", "blue star"]
    root.get_by_label("frame").fill("11")
    assert rows()[0] == ["red ball ✓", "90%"]
    assert root.locator(".xmg-fill").first.evaluate("bar => bar.style.width") == "90%"


def test_players_on_one_page_do_not_meet(page, tmp_path, player):
    players = open_page(page, tmp_path, player, play(film(5)), player)
    players.nth(2).get_by_label("step forward").click()
    players.nth(1).get_by_label("frame").fill("4")
    assert [frame(players.nth(i)) for i in range(3)] == [0, 4, 1]
    assert (pixels(page, 1) == film(5)[4]).all()


def test_player_put_into_a_page_later_starts(page, tmp_path, player):
    "As a notebook does: HTML is inserted, and its scripts are made anew so that they run."
    open_page(page, tmp_path, player)
    page.evaluate("""html => { const div = document.createElement('div'); div.innerHTML = html; document.body.append(div);
        for (const old of div.querySelectorAll('script')) { const s = document.createElement('script'); s.textContent = old.textContent; old.replaceWith(s); } }""",
                  play(film(5))._repr_html_())
    page.wait_for_function("() => document.querySelectorAll('.xmg[data-frame]').length == 2")
    page.locator(".xmg").nth(1).get_by_label("step forward").click()
    assert [frame(page.locator(".xmg").nth(i)) for i in (0, 1)] == [0, 1]


def test_without_scripts_a_strip_of_frames_remains(browser, tmp_path, player):
    player.save(tmp_path / "page.html")
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto((tmp_path / "page.html").as_uri())
    assert page.locator(".xmg-still img").is_visible() and not page.locator("canvas").is_visible()
    context.close()


@pytest.mark.parametrize("scheme, dark", [("light", False), ("dark", True)])
def test_words_read_on_light_and_dark(browser, tmp_path, player, scheme, dark):
    player.save(tmp_path / "page.html")
    page = browser.new_page(color_scheme=scheme)
    page.goto((tmp_path / "page.html").as_uri())
    ink = page.locator(".xmg-count").evaluate("e => getComputedStyle(e).color.match(/\\d+/g).slice(0, 3).map(Number)")
    assert (sum(ink) > 3 * 180) if dark else (sum(ink) < 3 * 80)
    page.close()
