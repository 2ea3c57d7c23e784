"""Takes the screenshots of the documents, from existing runs.

PYTHONPATH=.:tests python tests/view/screenshots.py LOGDIR docs/images --run NAME \
    --compare NAME NAME --dream NAME

The runs lie below the folder LOGDIR. The screenshots show the page and the videos of
one run (--run), the list with the curves of several (--compare), and a dream of one
(--dream). Those without their flag are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import pathlib
import time

from view_testing import browser, find, identity, text, view
from waiting_testing import wait_until

REST_SECONDS = 3.0  # For the page to finish drawing.
WIDTH, HEIGHT = 1280, 900


class Camera:
    """Opens pages of a view in a browser, and saves screenshots of them."""

    def __init__(self, driver, address, folder):
        self.driver, self.address, self.folder = driver, address, folder
        # Stops the videos: a screenshot could show the black frames at their end.
        calm = [{"name": "prefers-reduced-motion", "value": "reduce"}]
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": calm})

    def go(self, page, name, until):
        path = f"{page}/{identity(self.address, name)}" if name else page
        self.driver.get("about:blank")
        self.driver.get(f"{self.address}#/{path}")
        wait_until(lambda: text(self.driver, until), path)

    def take(self, kind, height=HEIGHT):
        size = {"width": WIDTH, "height": height, "deviceScaleFactor": 1}
        override = {**size, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", override)
        self.driver.execute_script("window.scrollTo(0, 0)")
        time.sleep(REST_SECONDS)
        self.driver.save_screenshot(str(self.folder / f"view-{kind}.png"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("logdir")
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--run")
    parser.add_argument("--compare", nargs="*", default=())
    parser.add_argument("--dream")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(view(options.logdir))
        driver = stack.enter_context(browser(WIDTH, HEIGHT))
        camera = Camera(driver, address, options.folder)
        if options.run:
            camera.go("run", options.run, "#box-env")
            camera.take("run", 1150)
            camera.go("videos", options.run, "figure")
            camera.take("videos")
        if options.compare:
            camera.go("runs", "", "tbody tr")
            for name in options.compare:
                row = f"tr[data-run='{identity(address, name)}'] input"
                find(driver, row)[0].click()
            camera.take("runs", 880)
        if options.dream:
            play(camera, options.dream)


def play(camera: Camera, name: str) -> None:
    """Plays some steps in the dream of an episode, and takes a screenshot."""
    driver = camera.driver
    camera.go("dream", name, "#begin")
    find(driver, "#source option[value=episode]")[0].click()
    find(driver, "#begin")[0].click()
    wait_until(lambda: "you play now" in text(driver, "#status"), "the dream", 240)
    for step in range(1, 7):
        find(driver, "body")[0].send_keys("12"[step % 2])
        shown = f"[data-at='{step}']"
        wait_until(functools.partial(find, driver, shown), f"step {step}")
    camera.take("dream", 760)


if __name__ == "__main__":
    main()
