"""The site of `make docs`, opened from disk in a headless Chromium: it fits, follows the colour scheme, and is searched
without a server."""

from pathlib import Path

import pytest
from window import SCHEMES, WIDTHS, faults, ground, show

from ci.docs.site import build


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="needs mkdocs (pip install 'verl-fuse[dev]')")
    folder = tmp_path_factory.mktemp("site") / "site"
    build(folder)
    return folder


def test_every_page_fits_and_has_no_error(browser, site):
    found, grounds = {}, set()
    for path in sorted(site.rglob("*.html")):
        for width, scheme in zip(WIDTHS, SCHEMES, strict=True):
            show(browser, path, width, scheme)
            grounds.add((scheme, ground(browser)))
            if wrong := faults(browser):
                found[str(path.relative_to(site)), width] = wrong
    assert found == {}
    assert {colour for scheme, colour in grounds if scheme == "light"}.isdisjoint(
        colour for scheme, colour in grounds if scheme == "dark"
    )


def test_the_widest_pages_fit_in_each_scheme(browser, site):
    for name in ("index.html", "verl_fuse/host/config/index.html", "verl_fuse/index.html"):
        for width in (685, *WIDTHS):
            for scheme in SCHEMES:
                show(browser, site / name, width, scheme)
                assert faults(browser) == [], (name, width, scheme)


def test_a_key_is_found_from_disk_and_has_its_place(browser, site):
    show(browser, site / "recipes/index.html")
    browser.execute_script("""
        const box = document.getElementById("mkdocs-search-query");
        box.value = "update.stream";
        box.dispatchEvent(new Event("input"));
    """)
    links = "return [...document.querySelectorAll('#mkdocs-search-results a')].map((link) => link.href)"
    waited = pytest.importorskip("selenium.webdriver.support.ui").WebDriverWait(browser, 20)
    found = waited.until(lambda driver: driver.execute_script(links))
    assert any("host/config" in link for link in found)
    assert faults(browser) == []
    show(browser, site / "verl_fuse/host/config/index.html")
    browser.execute_script("location.hash = 'fuse.update.stream'")
    assert browser.execute_script("return document.querySelector(':target').parentElement.tagName") == "H3"
