"""The pages of `skyrl view`, over HTTP: what they show, and what no page and no answer of a model can do there."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from skyrl.tracking.token_file import TokenFiles
from skyrl.viewer.pages import Pages
from skyrl.viewer.run_metrics import RunMetrics
from skyrl.viewer.sample_index import SampleIndex
from skyrl.viewer.server import RunFollower, view_app
from tests.viewer_run import HOSTILE, group, write

KEY = "a-key"
STORED = Path(__file__).parents[1] / "stored" / "0.1.0" / "run"


def client_of(run: Path, index: Path) -> TestClient:
    sample_index = SampleIndex(run / "trajectories.jsonl", index)
    while sample_index.update():
        pass
    pages = Pages(run, sample_index, TokenFiles(run / "tokens"))
    follower = RunFollower(sample_index, pages.metrics, run)
    follower.look()
    client = TestClient(view_app(pages, follower, KEY), base_url="http://127.0.0.1:8008")
    client.get("/", params={"key": KEY})
    return client


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """Two steps with the same prompt; an answer of the second is hostile, as are its prompt and its source."""
    folder = tmp_path_factory.mktemp("seen")
    write(
        folder,
        [
            [group(1, 0, ["abc~~d", "x"])],
            [group(2, 0, ["abc", "failure"]), group(2, 1, [HOSTILE], source=HOSTILE, prompt=HOSTILE)],
        ],
    )
    with client_of(folder, folder / "index") as client:
        yield client


class Elements(HTMLParser):
    """Every element of a page, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def test_the_list_links_to_each_sample(client: TestClient) -> None:
    page = Elements(client.get("/").text)
    assert [link["href"] for link in page.of("a") if link.get("class") == "open"] == [
        f"/sample/{number}" for number in (3, 4, 5, 1, 2)
    ]


def test_a_list_is_filtered_and_a_filter_that_cannot_be_is_answered_in_words(client: TestClient) -> None:
    assert "/sample/4" in client.get("/?failed=1").text and "/sample/3" not in client.get("/?failed=1").text
    wrong = client.get("/?step=x")
    assert wrong.status_code == 400 and "step is a whole number" in wrong.text


def tokens_of(html: str) -> list[dict[str, str | None]]:
    """The elements of tokens, without those of the legend."""
    page = Elements(re.sub(r'(?s)<p class="legend">.*?</p>', "", html))
    return [span for span in page.of("span") if (span.get("class") or "").startswith("t ")]


def headings(html: str) -> list[str]:
    """The texts of all headings of the third level."""
    return [" ".join(re.sub(r"<.*?>", " ", heading).split()) for heading in re.findall(r"(?s)<h3>(.*?)</h3>", html)]


@pytest.mark.parametrize(
    ("mode", "shades"),
    [
        ("mask", ["s", "s", "s", "m", "m", "s"]),
        ("probability", ["p7", "p7", "p7", "m", "m", "p7"]),
        ("difference", ["n1", "n1", "n1", "m", "m", "n1"]),
        ("advantage", ["a4", "a4", "a4", "m", "m", "a4"]),
        ("version", ["v0", "v0", "v0", "m", "m", "v0"]),
    ],
)
def test_tokens_are_coloured_by(client: TestClient, mode: str, shades: list[str]) -> None:
    """e^-0.25 is 0.78; the learner has -0.5, a quarter of a nat less."""
    tokens = tokens_of(client.get(f"/sample/1?colour={mode}").text)
    assert [(token["class"] or "").removeprefix("t ") for token in tokens] == shades
    hint = "id 97, log-probability -0.25, learner -0.5, difference -0.25, advantage 1, weights 0"
    assert tokens[0]["title"] == hint


def test_an_answer_is_cut_where_the_environment_speaks(client: TestClient) -> None:
    titles = headings(client.get("/sample/1").text)
    assert titles == ["expected answer", "system", "user", "assistant", "environment", "assistant · turn 2"]


def test_the_samples_of_a_group_stand_beside_each_other_with_their_rewards_by_component(client: TestClient) -> None:
    page = Elements(client.get("/group/2").text)
    assert len(page.of("article")) == 2 and "abc~~d" in page.text
    heads = re.findall(r'<th class="number">(.*?)</th>', client.get("/group/2").text)
    assert heads == ["reward", "correct", "format"]


def test_a_prompt_is_followed_over_the_steps(client: TestClient) -> None:
    page = client.get("/prompt?id=0:0").text
    assert headings(page) == [
        "system",
        "user",
        "expected answer",
        "step 1, mean reward 0.5",
        "step 2, mean reward 0.5",
    ]
    assert "sort this" in page and "in order" in page


@pytest.mark.parametrize(
    "path", ["/", "/sample/5", "/sample/5?colour=version", "/group/5", "/prompt?id=0:1", "/?words=%3Cscript%3E"]
)
def test_an_answer_of_the_model_is_text_on_every_page(client: TestClient, path: str) -> None:
    page = Elements(client.get(path).text)
    assert [script.get("src") for script in page.of("script")] == ["/static/view.js"] and page.of("img") == []
    assert [name for _, attributes in page.elements for name in attributes if name.startswith("on")] == []
    if path != "/?words=%3Cscript%3E":
        assert "document.title" in page.text


def test_an_address_is_no_way_to_put_anything_on_a_page(client: TestClient) -> None:
    query = {"words": HOSTILE, "prompt": HOSTILE, "source": HOSTILE, "stop": HOSTILE}
    for path in ("/", "/prompt"):
        page = Elements(client.get(path, params={**query, "id": HOSTILE}).text)
        assert page.of("img") == [] and len(page.of("script")) == 1


@pytest.mark.parametrize("path", ["/", "/sample/1", "/status", "/static/view.js", "/nowhere"])
def test_nothing_but_the_scripts_of_this_service_may_run_in_any_response(client: TestClient, path: str) -> None:
    headers = client.get(path).headers
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'") and "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff" and headers["x-frame-options"] == "DENY"


def test_the_key_of_the_printed_address_becomes_a_cookie_that_no_script_reads(client: TestClient) -> None:
    other = TestClient(client.app, base_url="http://127.0.0.1:8008", follow_redirects=False)
    answer = other.get(f"/?step=1&key={KEY}")
    assert (answer.status_code, answer.headers["location"]) == (303, "http://127.0.0.1:8008/?step=1")
    assert "HttpOnly" in answer.headers["set-cookie"] and "SameSite=strict" in answer.headers["set-cookie"]
    assert other.get("/?step=1").status_code == 200


@pytest.mark.parametrize(
    "path", ["/", "/sample/0", "/run", "/status", "/static/view.js", "/?key=", "/?key=another", "/nothing"]
)
def test_who_has_no_key_sees_nothing(client: TestClient, path: str) -> None:
    answer = TestClient(client.app, base_url="http://127.0.0.1:8008").get(path)
    assert answer.status_code == 403 and "Open the address that `skyrl view` printed" in answer.text
    assert "set-cookie" not in answer.headers and "default-src 'none'" in answer.headers["content-security-policy"]


def test_a_page_that_shows_everything_is_told_so_in_a_few_bytes(tmp_path: Path) -> None:
    write(tmp_path, [[group(1, 0, ["first"])]])
    index = SampleIndex(tmp_path / "trajectories.jsonl", tmp_path / "index")
    pages = Pages(tmp_path, index, TokenFiles(tmp_path / "tokens"))
    follower = RunFollower(index, pages.metrics, tmp_path)
    client = TestClient(view_app(pages, follower, KEY), base_url="http://127.0.0.1:8008")
    client.get("/", params={"key": KEY})
    seen = [client.get("/status").headers["etag"]]

    def is_new() -> bool:
        for _ in range(2):  # samples are read in parts, and the second look finds no more
            follower.look()
        answer = client.get("/status", headers={"if-none-match": seen[-1]})
        seen.append(answer.headers["etag"])
        assert (answer.status_code, bool(answer.content)) in [(304, False), (200, True)]
        return answer.status_code == 200

    changes: dict[str, Callable[[], object]] = {
        "nothing": lambda: None,
        "samples": lambda: write(tmp_path, [[group(2, 0, ["second"])]], first=2),
        "a step": lambda: (tmp_path / "metrics.jsonl").write_text('{"step": 2, "a": 1}\n', encoding="utf-8"),
        "an end": lambda: (tmp_path / "progress.json").write_text('{"state": "finished"}', encoding="utf-8"),
    }
    assert is_new()
    results = {}
    for name, change in changes.items():
        change()
        results[name] = is_new()
    assert results == {"nothing": False, "samples": True, "a step": True, "an end": True}


def test_the_page_of_a_run_has_its_card_and_its_curves(tmp_path: Path) -> None:
    write(tmp_path, [[group(1, 0, ["first"])]])
    with client_of(tmp_path, tmp_path / "index") as client:
        assert "No step is recorded yet." in client.get("/run").text
    lines = [{"step": 1, "reward/avg_raw_reward": 0.25, f"reward/component/{HOSTILE}": 1.0, "timing/generate": 2.0}]
    (tmp_path / "metrics.jsonl").write_text(json.dumps(lines[0]) + "\n", encoding="utf-8")
    with client_of(tmp_path, tmp_path / "index") as client:
        page = Elements(client.get("/run").text)
    assert len(page.of("svg")) == 2 and page.of("img") == [] and len(page.of("script")) == 1
    assert "0.25 → 0.25" in page.text and "generate" in page.text and "document.title" in page.text


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8008", "127.0.0.1.evil.example", "0.0.0.0:8008", ""])
def test_a_request_for_another_host_is_refused(client: TestClient, host: str) -> None:
    """A site whose name was pointed at this machine sends its own name."""
    for path in ("/", "/sample/1", "/run", "/status", "/static/view.js"):
        response = client.get(path, headers={"host": host})
        assert response.status_code == 400 and "sample" not in response.text


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
def test_no_route_writes(client: TestClient, method: str) -> None:
    for path in ("/", "/sample/1", "/group/1", "/prompt", "/run", "/status", "/static/view.js"):
        assert client.request(method, path).status_code == 405


@pytest.mark.parametrize("path", ["/sample/99", "/group/99", "/sample/99999999999999999999999", "/static/../server.py"])
def test_what_is_not_there_is_not_found(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == 404


def test_a_run_of_an_earlier_release_is_shown_without_tokens(tmp_path: Path) -> None:
    with client_of(STORED, tmp_path / "index") as client:
        page = Elements(client.get("/sample/1").text)
    assert "a version that stored no tokens" in page.text and "h" in page.text


def test_tokens_of_another_attempt_at_the_step_are_not_shown_for_a_sample(tmp_path: Path) -> None:
    write(tmp_path, [[group(1, 0, ["first"])]])
    write(tmp_path, [[group(1, 0, ["again"])]])
    with client_of(tmp_path, tmp_path / "index") as client:
        assert "sampled again since" in client.get("/sample/1").text
        assert "sampled again since" not in client.get("/sample/2").text


def test_long_answers_are_shown_in_parts(tmp_path: Path) -> None:
    write(tmp_path, [[group(1, 0, ["a" * 4000 + "b" * 10])]])
    with client_of(tmp_path, tmp_path / "index") as client:
        first, rest = (tokens_of(client.get(f"/sample/1?colour=version&from={start}").text) for start in (0, 4000))
    assert (len(first), len(rest)) == (4000, 10)


def test_the_follower_of_a_run_adds_lines_until_it_is_closed(tmp_path: Path) -> None:
    write(tmp_path, [[group(1, 0, ["first"])]])
    looked = threading.Semaphore(0)

    class Watched(SampleIndex):
        def update(self, most: int = 500) -> int:
            looked.release()
            return super().update(most)

    follower = RunFollower(Watched(tmp_path / "trajectories.jsonl", tmp_path / "index"), RunMetrics(tmp_path), tmp_path)
    follower.start()
    assert looked.acquire(timeout=600) and looked.acquire(timeout=600)
    follower.close()
    assert follower.complete and follower.samples == 1
