"""demur report --live: the page follows a run folder, on this machine only, until Ctrl-C."""

import json
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from demur.cli.report import _scored_if_any
from demur.report.live import LivePage, serving
from demur.runs import Run
from tests import forked
from tests.conftest import Command
from tests.test_explorer import CHROMIUM, REQUIRED, Tab, browser, figures

if TYPE_CHECKING:
    from playwright.sync_api import Browser

ROOT = Path(__file__).parents[1]
__all__ = ["browser"]  # the fixture


def get(address: str, host: str | None = None) -> str:
    headers = {"Host": host} if host else {}
    with urlopen(Request(address, headers=headers), timeout=20) as answer:
        return str(answer.read().decode())


@pytest.fixture
def live(tiny_run: Run, tmp_path: Path) -> Iterator[tuple[Run, LivePage, str]]:
    """The page of a run that looks as if it were in its second epoch."""
    path = tmp_path / "growing"
    path.mkdir()
    shutil.copy(tiny_run.path / "recipe.txt", path)
    lines = (tiny_run.path / "metrics.jsonl").read_text().splitlines()
    (path / "metrics.jsonl").write_text(lines[0] + "\n")
    run = Run(path)
    page = LivePage([run], lambda run: _scored_if_any(run, "cpu", None))
    with serving(page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield run, page, f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.mark.skipif(CHROMIUM is None and not REQUIRED, reason="needs chromium")
def test_curves_grow_and_records_appear(
    live: tuple[Run, LivePage, str], tiny_run: Run, browser: "Browser", command: Command
) -> None:
    run, _, address = live
    with Tab(browser, address) as page:
        page.wait_for_timeout(300)
        assert "in training, 1 of 4 epochs done" in page.inner_text("#live")
        assert "epoch 1 of 4" in page.inner_text("#curves")
        assert page.is_hidden("#explorer")
        shutil.copy(tiny_run.path / "metrics.jsonl", run.path)
        page.evaluate("Live.poll()")
        page.wait_for_timeout(500)
        assert "epoch 4 of 4" in page.inner_text("#curves")
        for name in ("model.safetensors", "checkpoint.json"):
            shutil.copy(tiny_run.path / name, run.path)
        assert command("attack", str(run.path), "clean", "--n", "40")[0] == 0
        page.evaluate("Live.poll()")
        page.locator("#explorer").wait_for(timeout=15_000)
        assert "of 40 images" in figures(page)["rule"]
        assert "1 record of test images" in page.inner_text("#live")
        assert "clean" in page.inner_text("#figures ~ .scroll")


def test_only_this_machine_is_served(live: tuple[Run, LivePage, str]) -> None:
    _, _, address = live
    port = address.rstrip("/").rsplit(":", 1)[1]
    state = json.loads(get(f"{address}state"))
    assert set(state) == {"version", "text"}
    assert "connect-src 'self'" in get(address)
    for path, host, code in (("", f"evil.example:{port}", 421), ("recipe.txt", None, 404)):
        with pytest.raises(HTTPError) as caught:
            get(address + path, host)
        assert caught.value.code == code


def test_a_closed_tab_prints_nothing(
    live: tuple[Run, LivePage, str],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, page, address = live
    port, left = int(address.rsplit(":", 1)[1].rstrip("/")), threading.Event()
    make = page.page

    def after_the_client_left() -> str:
        left.wait(20)
        return make() + 10_000_000 * " "

    monkeypatch.setattr(page, "page", after_the_client_left)
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
    left.set()
    assert get(address).startswith("<!doctype html>")
    assert capfd.readouterr().err == ""


def test_a_damaged_file_keeps_the_last_page(live: tuple[Run, LivePage, str]) -> None:
    run, page, _ = live
    before = page.page()
    (run.path / "checkpoint.json").write_text("{")
    assert page.page() == before
    assert "The page shows an earlier state" in page.state()["text"]


def test_an_unfinished_attack_is_counted(live: tuple[Run, LivePage, str]) -> None:
    run, page, _ = live
    parts = run.records_folder / ".making-0123" / "parts-4567"
    parts.mkdir(parents=True)
    for piece in ("0-64", "64-100"):
        (parts / f"{piece}-{'a' * 16}").touch()
    assert "an unfinished attack has 100 images done" in page.state()["text"]


def test_the_command_serves_until_ctrl_c(tiny_run: Run) -> None:
    process = forked.popen(
        ["-m", "demur", "report", str(tiny_run.path), "--live", "--no-open"], ROOT
    )
    said = process.stdout.readline()
    assert said.startswith("page: http://127.0.0.1:")
    address = said.split()[1]
    assert "<title>" in get(address)
    port = address.rstrip("/").rsplit(":", 1)[1]
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (130, "demur: stopped\n")
    assert port.isdigit()


def test_wrong_requests_raise(command: Command, live: tuple[Run, LivePage, str]) -> None:
    run, _, address = live
    port = address.rstrip("/").rsplit(":", 1)[1]
    code, _, err = command("report", str(run.path), "--live", "--no-open", "--port", port)
    assert code == 2
    assert f"port {port} cannot be served" in err
    code, _, err = command("report", *["a"] * 7)
    assert code == 2
    assert "a page shows at most 6 runs; name fewer than 7" in err
    code, _, err = command("report", "nothing", "--live")
    assert code == 2
    assert "there is no run 'nothing'" in err
