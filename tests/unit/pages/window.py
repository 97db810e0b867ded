"""Pages shown in windows of two widths and with two colour schemes."""

from pathlib import Path
from typing import Any

WIDTHS, SCHEMES = (700, 1400), ("light", "dark")


def show(browser: Any, address: Path, width: int = 1400, scheme: str = "light") -> None:
    """Open a file in a window of this width, with the colour scheme of the system."""
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    # What was said of the page before is no fault of this one.
    browser.get_log("browser")
    browser.get(address.as_uri())
    # The driver may answer before the scripts of a file have run, and a chart has been drawn.
    browser.execute_async_script("""
        const [done] = arguments, ready = () => document.readyState === "complete" && (!window.canvas || view);
        const wait = () => ready() ? done() : setTimeout(wait, 10);
        wait();
    """)


def faults(browser: Any) -> list[str]:
    """Return what is wrong with the page that is shown: errors of scripts and files, a page wider than the window."""
    wide, room = browser.execute_script(
        "const {scrollWidth, clientWidth} = document.documentElement; return [scrollWidth, clientWidth]"
    )
    found = [entry["message"] for entry in browser.get_log("browser")]
    return found + ([f"{wide} pixels wide, in {room}"] if wide > room else [])


def ground(browser: Any) -> str:
    """Return the colour behind the page."""
    return browser.execute_script("return getComputedStyle(document.body).backgroundColor")
