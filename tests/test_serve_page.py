"""The page of the service and the ONNX file in a real browser."""

import functools
import io
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import uvicorn
from PIL import Image
from torch import Tensor

from demur import Guard, LoadedRun
from demur.serve import Settings, create_app
from tests.test_report import CHROMIUM, REQUIRED

needs_browser = pytest.mark.skipif(CHROMIUM is None and not REQUIRED, reason="needs chromium")
ORT_WEB = os.environ.get("DEMUR_ORT_WEB", "")  # folder `dist` of the package onnxruntime-web
SCREENSHOTS = os.environ.get("DEMUR_SCREENSHOTS")  # folder for screenshots to look at
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]


@contextmanager
def serving(guard: Guard, settings: Settings = Settings(timeout=120.0)) -> Iterator[str]:
    """Address of a service in a thread."""
    config = uvicorn.Config(create_app(guard, settings), port=0, log_level="error")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        end = time.monotonic() + 60
        while not server.started:
            assert time.monotonic() < end
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    assert CHROMIUM is not None, "DEMUR_REQUIRE_BROWSER=1, but no chromium is installed"
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def pictures(tiny_guard: Guard, tiny_source: LoadedRun) -> dict[str, bytes]:
    """One image that is accepted and one that is rejected, as PNG files."""
    images = (tiny_source.splits["test"].pixels[:100, 0].float() / 16 * 255).round().byte().numpy()
    accepted = tiny_guard(images[..., None]).accepted
    chosen = {"accepted": images[accepted][0], "rejected": images[~accepted][0]}
    return {name: png(pixels) for name, pixels in chosen.items()}


def png(pixels: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def upload(tab: Any, content: bytes, name: str = "image.png") -> None:
    tab.set_input_files("#file", {"name": name, "mimeType": "image/png", "buffer": content})


def look(tab: Any, name: str) -> None:
    if SCREENSHOTS:
        tab.screenshot(path=str(Path(SCREENSHOTS) / f"{name}.png"), full_page=True)


def check_width(tab: Any, name: str) -> None:
    """No part of the page is wider than a phone in light or a screen in dark colours."""
    for width, scheme in ((1280, "dark"), (390, "light")):
        tab.set_viewport_size({"width": width, "height": 800})
        tab.emulate_media(color_scheme=scheme)
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        look(tab, f"{name}-{width}")


@needs_browser
def test_the_page_classifies_rejects_and_attacks(
    browser: Any, tiny_guard: Guard, pictures: dict[str, bytes]
) -> None:
    problems: list[str] = []
    with serving(tiny_guard) as address:
        tab = browser.new_page(viewport={"width": 390, "height": 800})
        tab.on("console", lambda entry: problems.append(entry.text))
        tab.on("pageerror", lambda error: problems.append(str(error)))
        hosts: set[str] = set()
        tab.on("request", lambda request: hosts.add(request.url.split("/")[2]))
        tab.goto(address)
        tab.wait_for_selector("#rule:has-text('R-Con')")
        assert "10 classes; accepts where R-Con" in tab.inner_text("#rule")
        summary = tab.inner_text("header #summary")
        assert "above chance (10.0%) and the largest class" in summary
        assert "% of the calibration images" in summary
        assert tab.inner_text("#inputs") == "Images must have 8 \u00d7 8 pixels."
        check_width(tab, "start")
        for name, content in pictures.items():
            upload(tab, content)
            tab.wait_for_selector(f"#verdict.{name}")
            assert tab.inner_text("#verdict").endswith(f": {name}")
            assert tab.inner_text("#reason").startswith(f"{name}: R-Con")
            shares = tab.locator("#classes li span:last-child").all_inner_texts()
            values = [float(share.rstrip("%")) for share in shares]
            assert len(values) == 10
            assert values == sorted(values, reverse=True)
            cells = tab.locator("#scores td").all_inner_texts()
            assert cells[0] == "confidence"
            assert cells[3] == "R-Con"
            assert tab.evaluate("document.getElementById('preview').naturalWidth") == 8
            assert tab.evaluate("document.activeElement.id") == "verdict"
            check_width(tab, name)
        tab.click("#attack")
        tab.wait_for_selector("#attacked:not([hidden])")
        assert tab.inner_text("#attack-text").startswith("PGD in the Linf ball of radius 38.2/255")
        widths = "[...document.querySelectorAll('#attacked img')].map(i => i.naturalWidth)"
        assert tab.evaluate(widths) == [8, 8, 8]
        check_width(tab, "attacked")
        assert problems == []
        assert {host for host in hosts if host} == {address.removeprefix("http://")}
        upload(tab, b"no image")
        tab.wait_for_selector("#status:has-text('damaged')")
        assert tab.is_hidden("#result")
        check_width(tab, "damaged")
        tab.close()


DROP = """data => {
  const files = new DataTransfer();
  files.items.add(new File([new Uint8Array(data)], "a.png", {type: "image/png"}));
  const event = new DragEvent("drop", {dataTransfer: files, bubbles: true, cancelable: true});
  document.getElementById("drop").dispatchEvent(event);
}"""


@needs_browser
def test_the_page_by_keyboard_by_drop_and_with_a_token(
    browser: Any, tiny_guard: Guard, pictures: dict[str, bytes]
) -> None:
    with serving(tiny_guard, Settings(token="a-long-word", timeout=120.0)) as address:
        tab = browser.new_page()
        tab.goto(address)
        tab.wait_for_selector("#token-form:not([hidden])")
        tab.keyboard.press("Tab")
        assert tab.evaluate("document.activeElement.id") == "token"
        tab.keyboard.type("wrong")
        tab.keyboard.press("Tab")
        assert tab.evaluate("document.activeElement.id") == "file"
        outline = "getComputedStyle(document.querySelector('label[for=file]')).outlineStyle"
        assert tab.evaluate(outline) == "solid"
        tab.evaluate(DROP, list(pictures["accepted"]))
        tab.wait_for_selector("#status:has-text('token')")
        tab.fill("#token", "a-long-word")
        tab.press("#token", "Enter")
        tab.wait_for_selector("#verdict.accepted")
        tab.keyboard.press("Tab")
        assert tab.evaluate("document.activeElement.id") == "attack"
        tab.keyboard.press("Enter")
        tab.wait_for_selector("#attacked:not([hidden])")
        assert tab.evaluate("document.activeElement.id") == "attack-title"
        tab.close()


@needs_browser
def test_several_files_a_photo_and_labels_for_the_rejected(
    browser: Any, tiny_guard: Guard, pictures: dict[str, bytes]
) -> None:
    problems: list[str] = []
    with serving(tiny_guard) as address:
        tab = browser.new_page(viewport={"width": 1280, "height": 800})
        tab.on("console", lambda entry: problems.append(entry.text))
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.goto(address)
        tab.wait_for_selector("#rule:has-text('R-Con')")
        files = [
            {"name": f"{name}.png", "mimeType": "image/png", "buffer": content}
            for name, content in (*pictures.items(), ("=1+1", pictures["rejected"]))
        ]
        tab.set_input_files("#file", files)
        tab.wait_for_selector("#list:not([hidden])")
        tab.set_input_files("#camera", files[:1])  # as a phone's camera gives it
        tab.wait_for_selector("#counts:has-text('4 images, 2 rejected')")
        assert tab.get_attribute("#camera", "capture") == "environment"
        tab.click("#all button.rejected >> nth=0")
        assert tab.inner_text("#verdict").endswith(": rejected")
        tab.fill("#rejected input >> nth=0", 'a "new" class')
        with tab.expect_download() as waiting:
            tab.click("#download")
        rows = Path(waiting.value.path()).read_text().splitlines()
        assert rows[0] == '"file","label","predicted","reason"'
        assert rows[1].startswith('"rejected.png","a ""new"" class"')
        assert rows[2].startswith('"\'=1+1.png",""')
        check_width(tab, "list")
        assert problems == []
        tab.close()


@needs_browser
def test_without_attacks_the_page_has_no_button(
    browser: Any, tiny_guard: Guard, pictures: dict[str, bytes]
) -> None:
    with serving(tiny_guard, Settings(attack=False)) as address:
        tab = browser.new_page()
        tab.goto(address)
        tab.wait_for_selector("#rule:has-text('R-Con')")
        upload(tab, pictures["accepted"])
        tab.wait_for_selector("#verdict.accepted")
        assert tab.is_hidden("#attack")
        tab.close()


# ---------------------------------------------------------------------------------- ONNX


@pytest.fixture(scope="module")
def thousand(tiny_source: LoadedRun) -> Tensor:
    return tiny_source.splits["fit"].batch(slice(0, 1000))[0]


def test_onnxruntime_decides_as_the_guard_on_a_thousand_images(
    tiny_guard: Guard, onnx_file: Path, thousand: Tensor
) -> None:
    import onnxruntime

    session = onnxruntime.InferenceSession(onnx_file)
    assert [one.name for one in session.get_inputs()] == ["images"]
    assert [one.name for one in session.get_overridable_initializers()] == ["thresholds"]
    expected = tiny_guard(thousand)
    assert 0 < expected.accepted.sum() < 1000
    for images in (thousand, thousand[:1]):  # any batch size
        n = len(images)
        labels, accepted, scores, probabilities = session.run(None, {"images": images.numpy()})
        assert np.array_equal(labels, expected.labels[:n])
        assert np.array_equal(accepted, expected.accepted[:n])
        assert np.allclose(scores, expected.scores[:n], atol=1e-5, rtol=0)
        assert np.allclose(probabilities, expected.probabilities[:n], atol=1e-5, rtol=0)


def test_thresholds_are_an_input_and_values_out_of_range_are_rejected(
    onnx_file: Path, thousand: Tensor
) -> None:
    import onnxruntime

    session = onnxruntime.InferenceSession(onnx_file)
    images = thousand[:50].clone().numpy()
    for threshold, accepts in ((-1.0, True), (2.0, False)):
        feed = {"images": images, "thresholds": np.array([threshold], np.float32)}
        assert (session.run(["accepted"], feed)[0] == accepts).all()
    images[0, 0, 0, 0], images[1, 0, 0, 0], images[2, 0, 0, 0] = 1.01, -0.01, np.nan
    feed["images"], feed["thresholds"] = images, np.array([-1.0], np.float32)
    assert session.run(["accepted"], feed)[0].tolist() == [False] * 3 + [True] * 47


def test_the_file_is_whole_and_describes_itself(onnx_file: Path, tiny_guard: Guard) -> None:
    import onnx

    model = onnx.load(onnx_file, load_external_data=False)
    assert not any(one.external_data for one in model.graph.initializer)
    texts = {one.key: one.value for one in model.metadata_props}
    assert texts["class_names"].split("\n") == list(tiny_guard.class_names)
    assert [path.name for path in onnx_file.parent.iterdir()] == ["model.onnx"]


@pytest.mark.parametrize("absent", ["onnx", "onnxruntime", "onnxscript"])
def test_a_missing_package_is_one_sentence(
    tiny_guard: Guard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, absent: str
) -> None:
    import sys

    from demur import BadInput

    monkeypatch.setitem(sys.modules, absent, None)
    with pytest.raises(BadInput, match=r"pip install 'demur\[onnx\]'"):
        tiny_guard.export_onnx(tmp_path / "model.onnx")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("traced", [pytest.param(True, marks=pytest.mark.exhaustive), False])
def test_a_model_that_cannot_be_exported_is_one_sentence(
    tiny_guard: Guard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, traced: bool
) -> None:
    """The exporter takes seconds to find out that it cannot trace a model."""
    from dataclasses import replace

    from demur import BadInput

    def branching(x: Tensor) -> Tensor:
        return torch.eye(10)[[int(one.sum()) % 10 for one in x]]

    def fail(*given: object, **more: object) -> None:
        raise RuntimeError("Failed to export the model.\nStep 1 of 3")

    if not traced:
        monkeypatch.setattr(torch.onnx, "export", fail)
    with pytest.raises(BadInput, match="the model cannot be exported to ONNX") as caught:
        replace(tiny_guard, model=branching).export_onnx(tmp_path / "model.onnx")
    assert "\n" not in str(caught.value)


WEB = """
<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,">
<script type="module">
import * as ort from "./ort.wasm.min.mjs";
ort.env.wasm.numThreads = 1;
const session = await ort.InferenceSession.create("model.onnx");
window.classify = async (values, dims) => {
  const images = new ort.Tensor("float32", Float32Array.from(values), dims);
  const { labels, accepted, scores } = await session.run({ images });
  return [[...labels.data].map(Number), [...accepted.data].map(Boolean), [...scores.data]];
};
</script>
"""
ORT_FILES = ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")


@needs_browser
@pytest.mark.skipif(not ORT_WEB, reason="needs DEMUR_ORT_WEB, the folder dist of onnxruntime-web")
def test_onnxruntime_web_decides_as_the_guard(
    browser: Any, tiny_guard: Guard, onnx_file: Path, thousand: Tensor, tmp_path: Path
) -> None:
    for name in ORT_FILES:
        shutil.copy(Path(ORT_WEB) / name, tmp_path / name)
    shutil.copy(onnx_file, tmp_path / "model.onnx")
    (tmp_path / "index.html").write_text(WEB)

    class Handler(SimpleHTTPRequestHandler):
        extensions_map = {".mjs": "text/javascript", ".wasm": "application/wasm", ".html":
                          "text/html", "": "application/octet-stream"}  # fmt: skip

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Handler, directory=str(tmp_path))
    )
    threading.Thread(target=server.serve_forever).start()
    problems: list[str] = []
    try:
        tab = browser.new_page()
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.goto(f"http://127.0.0.1:{server.server_address[1]}/index.html")
        tab.wait_for_function("window.classify !== undefined", timeout=60_000)
        x = thousand[:200]
        call = "([values, dims]) => window.classify(values, dims)"
        labels, accepted, scores = tab.evaluate(call, [x.flatten().tolist(), list(x.shape)])
        tab.close()
    finally:
        server.shutdown()
        server.server_close()
    expected = tiny_guard(x)
    assert problems == []
    assert labels == expected.labels.tolist()
    assert accepted == expected.accepted.tolist()
    assert np.allclose(scores, expected.scores[:, 0], atol=1e-5)
