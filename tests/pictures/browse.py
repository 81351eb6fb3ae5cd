"""Opens pages in headless Chromium and prints one JSON list per check: what, whether it passed, detail. Run by check.py."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

SIZES = {"wide": (1920, 1080), "middle": (1280, 900), "narrow": (390, 844)}


def browser() -> webdriver.Chrome:
    options = webdriver.ChromeOptions()
    for word in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    return webdriver.Chrome(options=options, service=webdriver.ChromeService("/usr/bin/chromedriver"))


def complaints(driver: webdriver.Chrome) -> list[str]:
    """What the console says, and which requests other than for the page itself were made."""
    messages = [entry["message"] for entry in driver.get_log("browser")]
    for entry in driver.get_log("performance"):
        event = json.loads(entry["message"])["message"]
        url = event["params"].get("request", {}).get("url", "") if event["method"] == "Network.requestWillBeSent" else ""
        if url and not url.startswith(("file:", "data:")):
            messages.append(f"request of {url}")
    return messages


def page_checks(driver: webdriver.Chrome, name: str, path: str) -> Iterator[tuple[str, bool, str]]:
    for scheme in ("light", "dark"):
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
        for size, (width, height) in SIZES.items():
            driver.execute_cdp_cmd(
                "Emulation.setDeviceMetricsOverride", {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
            )
            driver.get(f"file://{path}")
            found = complaints(driver)
            yield f"{name}, {scheme}, {size}: nothing in the console, no request", not found, str(found)
            content = driver.execute_script("return document.documentElement.scrollWidth")
            yield f"{name}, {scheme}, {size}: not wider than the window", content <= width, f"{content} in {width}"
            charts = driver.execute_script(
                "return [...document.querySelectorAll('.draw,.bars svg,svg,.labels,.marks')].map(e=>[e.getBoundingClientRect(),"
                "e.getAttribute('aria-label')||e.className]).filter(([r])=>r.width&&(r.right>innerWidth+1||r.left<-1)).map(([,n])=>n)"
            )
            yield f"{name}, {scheme}, {size}: every chart fits the window", not charts, str(charts[:3])
            colours = driver.execute_script("const s=getComputedStyle(document.body);return [s.backgroundColor,s.color]")
            light = [sum(map(int, re.findall(r"\d+", each)[:3])) for each in colours]
            yield (
                f"{name}, {scheme}, {size}: readable colours",
                (light[0] > light[1] + 300) if scheme == "light" else (light[1] > light[0] + 300),
                str(colours),
            )
    cut = driver.execute_script(
        "return [...document.querySelectorAll('h1,p,dd,td,.name,.more,nav a')].filter(e=>e.scrollWidth>e.clientWidth+1&&e.clientWidth"
        "&&getComputedStyle(e).display!=='inline').map(e=>e.textContent.slice(0,60))"
    )
    yield f"{name}: no text is cut", not cut, str(cut[:3])
    parts = driver.find_elements(By.TAG_NAME, "summary")
    if parts:
        was = driver.execute_script("return arguments[0].parentNode.open", parts[0])
        parts[0].send_keys(Keys.ENTER)
        now = driver.execute_script("return arguments[0].parentNode.open", parts[0])
        yield f"{name}: a part unfolds by keyboard", was != now, f"{was} {now}"


def map_check(driver: webdriver.Chrome, path: str, tensor: dict) -> Iterator[tuple[str, bool, str]]:
    """The strips of one tensor lie on the screen where its boxes lie in the index."""
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {"width": 1200, "height": 900, "deviceScaleFactor": 1, "mobile": False})
    driver.get(f"file://{path}")
    drawn = driver.execute_script(
        "const svg=[...document.querySelectorAll('svg')].find(s=>s.getAttribute('aria-label').endsWith(arguments[0]));"
        "const ground=svg.querySelector('rect').getBoundingClientRect();"
        "return [...svg.querySelectorAll('path.a,path.b')].map(p=>{const r=p.getBoundingClientRect();"
        "return [p.textContent,(r.left-ground.left)/ground.width,(r.right-ground.left)/ground.width,p.className.baseVal]})",
        tensor["name"],
    )
    rows = tensor["shape"][0]
    expected = {
        (
            f"rank {piece['rank']}",
            piece["offsets"][0] / rows,
            (piece["offsets"][0] + piece["sizes"][0]) / rows,
            "b" if piece["replica"] else "a",
        )
        for piece in tensor["pieces"]
    }
    same = len(drawn) == len(expected) and all(
        any(label == e[0] and kind == e[3] and abs(left - e[1]) < 0.01 and abs(right - e[2]) < 0.01 for e in expected)
        for label, left, right, kind in drawn
    )
    yield "the map of a tensor lies where the index says", same, f"{drawn} instead of {sorted(expected)}"


def interactive_check(driver: webdriver.Chrome, path: str) -> Iterator[tuple[str, bool, str]]:
    driver.get(f"file://{path}")
    driver.find_element(By.ID, "filter").send_keys("q_proj")
    shown = [each.text for each in driver.find_elements(By.CSS_SELECTOR, "div.row") if each.is_displayed()]
    yield "the filter shows what it names, and nothing else", bool(shown) and all("q_proj" in text for text in shown), str(shown)
    driver.find_element(By.ID, "filter").send_keys(Keys.CONTROL, "a", Keys.BACKSPACE)
    heads = [each for each in driver.find_elements(By.TAG_NAME, "th") if each.text == "elements"]
    heads[0].click()
    numbers = [int(each.text.replace(",", "")) for each in driver.find_elements(By.CSS_SELECTOR, "#kinds td:nth-child(4)")]
    yield "a column sorts on a click", numbers == sorted(numbers) and len(numbers) > 2, str(numbers)
    yield "the script of the page breaks no rule", not complaints(driver), "see the console"


def main() -> None:
    given, tensor = (json.loads(Path(path).read_text()) for path in sys.argv[1:3])
    driver = browser()
    try:
        for name, path in given["pages"].items():
            for check in page_checks(driver, name, path):
                print(json.dumps(check), flush=True)
        for check in (*map_check(driver, given["pages"]["one tensor"], tensor), *interactive_check(driver, given["pages"]["interactive"])):
            print(json.dumps(check), flush=True)
        driver.get(f"file://{given['broken']}")
        found = complaints(driver)
        stopped = len(found) >= 2 and driver.title != "ran"
        print(json.dumps(("a script and a request that do not belong there are stopped and noticed", stopped, str(found))), flush=True)
    finally:
        driver.quit()


main()
