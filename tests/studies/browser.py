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
            said(browser), requests(browser)  # what the browser itself loaded when it started
            yield browser
        finally:
            browser.quit()


def said(browser):
    """What the console says since the last call."""
    return [entry["message"] for entry in browser.get_log("browser")]


def requests(browser):
    """The addresses that were asked for since the last call."""
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [
        event["params"]["request"]["url"]
        for event in events
        if event["method"] == "Network.requestWillBeSent"
    ]


def awaited(browser, selector, seconds=30):
    """The first element of `selector` once there is one: pages draw after they have loaded."""
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support import expected_conditions, wait

    there = expected_conditions.presence_of_element_located((By.CSS_SELECTOR, selector))
    return wait.WebDriverWait(browser, seconds).until(there)
