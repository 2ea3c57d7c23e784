"""Takes the pictures of the documents, of runs that are there.

PYTHONPATH=. python tests/view/screenshots.py LOGDIR NAME docs/images

NAME is that of the run below the folder LOGDIR whose page and dream are shown.
"""

from __future__ import annotations

import pathlib
import sys
import time

from selenium.webdriver.common.keys import Keys
from view_testing import browser, find, identity, text, view, wait_for

REST_SECONDS = 3.0  # For what is drawn to come to rest.


def main(logdir: str, name: str, folder: str) -> None:
    out = pathlib.Path(folder)
    with view(logdir) as address, browser(1280, 1000) as driver:

        def shot(kind: str) -> None:
            time.sleep(REST_SECONDS)
            driver.save_screenshot(str(out / f"view-{kind}.png"))

        run = identity(address, name)
        driver.get(f"{address}#/run/{run}")
        wait_for(lambda: text(driver, "#state"), "the run")
        find(driver, "input[type=range]")[0].send_keys(Keys.ARROW_RIGHT * 5)
        driver.set_window_size(1280, 1500)
        shot("run")
        driver.set_window_size(1280, 1000)
        driver.get(f"{address}#/runs")
        wait_for(lambda: text(driver, "tbody tr"), "the runs")
        find(driver, f"tr[data-run='{run}'] input")[0].click()
        shot("runs")
        driver.get(f"{address}#/videos/{run}")
        wait_for(lambda: find(driver, "main figure"), "the videos")
        shot("videos")
        driver.get(f"{address}#/dream/{run}")
        wait_for(lambda: text(driver, "#begin"), "the dream")
        find(driver, "#source option[value=episode]")[0].click()
        find(driver, "#begin")[0].click()
        wait_for(lambda: "you play now" in text(driver, "#status"), "the dream", 240)
        find(driver, "body")[0].send_keys("2")
        shot("dream")


if __name__ == "__main__":
    main(*sys.argv[1:])
