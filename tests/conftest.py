"What the tests of several files share."
import os
import shutil

import pytest

CHROMIUM = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"]


@pytest.fixture(scope="module")
def browser():
    """Chromium; skips where it or Playwright is missing, since neither is needed to use the package.

    It ends with the module: as long as Playwright's synchronous interface is open, its event loop runs in this thread, and neither `asyncio.run` nor a second browser can start.
    """
    playwright = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no Chromium here")
    with playwright.sync_playwright() as play:
        made = play.chromium.launch(executable_path=CHROMIUM, headless=True, args=FLAGS)
        yield made
        made.close()
