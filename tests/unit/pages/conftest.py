"""A headless Chromium; the pages are made of the data of other tests.

Skipped where Chromium, its driver (Debian: apt-get install chromium chromium-driver) or selenium is missing.
"""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("timeline", "compare", "schedule"))


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium (pip install 'verl-fuse[dev]')")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("needs Chromium and its driver on the PATH: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    # Without a sandbox of its own: tests often run as root in a container, and these pages are the tests'.
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    session = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield session
    session.quit()
