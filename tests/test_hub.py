"""Names on the hub are tried once, with a deadline, and what is wrong with them is reported in words."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from skyrl.data.hugging_face import read_dataset
from skyrl.errors import DataError, ModelError
from skyrl.hub import hub_failure
from skyrl.models.files.loading import model_source
from skyrl.models.files.paths import INDEX, large_text_failure, model_failure
from skyrl.tree.files import MOST_STORED


class Hub:
    """A server in place of the hub, which notes what it is asked."""

    def __init__(self, status: int | None) -> None:
        """`status` answers every request; None: no request is answered before `close`."""
        paths: list[str] = []
        files: list[dict[str, object]] = []
        closing = threading.Event()

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                paths.append(self.path)
                if status is None:
                    closing.wait()
                    return
                self.send_response(status)
                for name, value in {"ETag": '"1"', "X-Repo-Commit": "1", "Content-Length": "0"}.items():
                    self.send_header(name, value)
                if status == 404:
                    self.send_header("X-Error-Code", "RepoNotFound")
                self.end_headers()

            def do_GET(self) -> None:
                if status != 200:
                    self.do_HEAD()
                    return
                paths.append(self.path)
                body = json.dumps({"id": "a/b", "siblings": files}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Nothing is printed."""

        self.asked, self.files, self._closing = paths, files, closing
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def hub(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The server as the hub of this process, with an empty cache."""
    server = Hub(request.param)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", server.address)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.address + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    hub_failure.cache_clear()
    yield server
    hub_failure.cache_clear()
    server.close()


@pytest.mark.parametrize("hub", [None], indirect=True)
def test_a_hub_that_never_answers_is_given_up_after_the_deadline_and_asked_once(hub: Hub) -> None:
    message = hub_failure("base/modle", deadline=0.05)
    assert message is not None
    assert "gave no answer within 0.05 s" in message
    assert "HF_HUB_OFFLINE" in message
    assert hub_failure("base/modle", deadline=0.05) == message
    assert len([path for path in hub.asked if "modle" in path]) <= 1


@pytest.mark.parametrize("hub", [404], indirect=True)
@pytest.mark.parametrize("kind", ["model", "dataset"])
def test_a_name_that_the_hub_does_not_have_is_reported_as_such(hub: Hub, kind: str) -> None:
    assert "the hub has nothing of this name" in (hub_failure("nobody/nothing", kind, deadline=60.0) or "")
    assert len([path for path in hub.asked if "nobody/nothing" in path]) == 1


@pytest.mark.parametrize("hub", [200], indirect=True)
def test_a_name_that_the_hub_has_passes(hub: Hub) -> None:
    assert hub_failure("somebody/something", deadline=60.0) is None


@pytest.mark.parametrize("hub", [200], indirect=True)
@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", INDEX, "tokenizer.json", "merges.txt", "a.jinja"]
)
def test_a_text_of_a_model_on_the_hub_without_end_is_not_downloaded(hub: Hub, name: str) -> None:
    hub.files += [{"rfilename": "model.safetensors", "size": 1 << 40}, {"rfilename": name, "size": MOST_STORED}]
    assert large_text_failure("a/b") is None
    hub.files[-1]["size"] = MOST_STORED + 1
    with pytest.raises(ModelError, match=rf"a/b/{name} is larger than 64 MiB, .* it is not downloaded"):
        model_source("a/b")
    assert {path.partition("?")[0] for path in hub.asked} == {"/a/b/resolve/main/config.json", "/api/models/a/b"}


def test_without_a_network_the_cache_is_looked_at_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    hub_failure.cache_clear()
    assert "HF_HUB_OFFLINE is set" in (hub_failure("some/model") or "")
    snapshot = tmp_path / "models--some--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (tmp_path / "models--some--model" / "refs").mkdir()
    (tmp_path / "models--some--model" / "refs" / "main").write_text("abc")
    hub_failure.cache_clear()
    assert hub_failure("some/model") is None


def test_a_mistyped_folder_is_named_with_the_one_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "base" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert "there is no such folder here (did you mean base/model?)" in (model_failure("base/modle") or "")
    assert "there is no model folder ./base/modle (did you mean base/model?)" in (model_failure("./base/modle") or "")
    with pytest.raises(DataError, match=r"base/modell cannot be loaded: .* \(did you mean base/model\?\)"):
        list(read_dataset("base/modell"))
