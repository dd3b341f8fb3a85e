"""A headless Chromium for tests of pages."""

import contextlib
import json
import shutil
import tempfile

import pytest

FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--window-size=1400,1200",
)  # fmt: skip


@contextlib.contextmanager
def chromium():
    """A selenium driver; the test is skipped, with the reason, where there is no Chromium."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="the extra `dev` lacks selenium")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (chromium and driver):
        pytest.skip("no browser: chromium and chromedriver are not both on the path")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        service = webdriver.chrome.service.Service(driver)
        browser = webdriver.Chrome(options, service)
        try:
            browser.get("about:blank")
            messages(browser), requests(browser)  # of the browser's start
            yield browser
        finally:
            browser.quit()


def messages(browser):
    """Messages of the console since the last call."""
    return [entry["message"] for entry in browser.get_log("browser")]


def requests(browser):
    """Addresses requested since the last call."""
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [
        event["params"]["request"]["url"]
        for event in events
        if event["method"] == "Network.requestWillBeSent"
    ]
