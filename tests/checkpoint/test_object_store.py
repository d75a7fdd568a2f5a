"""The store on a real S3 server whose answers are errors every now and then."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from skyrl.checkpoint.store import CheckpointStore
from skyrl.errors import ResumeError, RunError, UserError
from skyrl.installation import install_command
from skyrl.storage.bucket import may_pass, patiently
from tests.checkpoint.faulty import checkpoint, equals_checkpoint
from tests.checkpoint.object_store import BUCKET, ObjectStore

pytestmark = pytest.mark.xdist_group("s3")


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectStore]:
    with ObjectStore(failures=0.05) as store, pytest.MonkeyPatch.context() as patch:
        for name, value in store.environment.items():
            patch.setenv(name, value)
        yield store


@pytest.mark.long
def test_of_many_saves_with_one_error_in_twenty_requests_none_is_lost(
    server: ObjectStore, pytestconfig: pytest.Config
) -> None:
    """3 saves; 1,000 under --long, of eight runs at a time, since most of it is waiting."""
    runs, count = (8, 125) if pytestconfig.getoption("--long") else (1, 3)
    before = server.refused
    with ThreadPoolExecutor(runs) as threads:
        assert list(threads.map(save_and_lose_none, range(runs), [count] * runs)) == [count] * runs
    assert server.refused - before > runs * count / 5


def save_and_lose_none(run: int, count: int) -> int:
    """How many saves of a run were there as soon as they were done, the last three of them whole in the end."""
    store = CheckpointStore(f"s3://{BUCKET}/many/{run}", keep=3)
    visible = 0
    for step in range(1, count + 1):
        store.save(checkpoint(step))
        visible += store.steps()[-1] == step
    assert store.steps() == [count - 2, count - 1, count]
    assert [store.verify(step) for step in store.steps()] == [[]] * 3
    assert equals_checkpoint(CheckpointStore(store.folder).latest(), count)
    return visible


def test_a_checkpoint_without_its_manifest_is_an_upload_that_never_ended(server: ObjectStore) -> None:
    store = CheckpointStore(f"s3://{BUCKET}/cut")
    for step in (1, 2):
        store.save(checkpoint(step))
    store.storage.remove("global_step_2/manifest.json")
    assert equals_checkpoint(store.latest(), 1)
    store.save(checkpoint(3))
    assert store.storage.names() == ["global_step_1", "global_step_3"]


def test_a_damaged_object_is_named(server: ObjectStore) -> None:
    store = CheckpointStore(f"s3://{BUCKET}/damaged")
    store.save(checkpoint(1))
    store.storage.write("global_step_1/state.json", [b"{}"])
    with pytest.raises(ResumeError, match=f"s3://{BUCKET}/damaged/global_step_1/state.json is damaged: it has 2 bytes"):
        store.latest()


def test_a_bucket_that_is_not_there_is_a_message(server: ObjectStore) -> None:
    with pytest.raises(RunError, match="the checkpoint s3://nowhere/run/global_step_1 cannot be written"):
        CheckpointStore("s3://nowhere/run").save(checkpoint(1))
    with pytest.raises(ResumeError, match="^the content of s3://nowhere/run cannot be listed: .*/nowhere.* 404 Not"):
        CheckpointStore("s3://nowhere/run").latest()


def test_what_may_pass_is_tried_again_and_what_will_not_is_raised_at_once() -> None:
    tries: list[int] = []

    def fails_twice() -> str:
        tries.append(len(tries))
        if len(tries) < 3:
            raise TimeoutError("slow")
        return "there"

    assert patiently(fails_twice) == "there"
    assert tries == [0, 1, 2]


def of_obstore(name: str, text: str = "") -> Exception:
    """An exception as obstore raises it: known by its module and its name alone."""
    kind = type(name, (Exception,), {"__module__": "obstore.exceptions"})
    error: Exception = kind(text)
    return error


@pytest.mark.parametrize(
    ("error", "may"),
    [
        (OSError("reset"), True),
        (TimeoutError(), True),
        (ConnectionError(), True),
        (FileNotFoundError(), False),
        (FileExistsError(), False),
        (PermissionError(), False),
        (NotADirectoryError(), False),
        (IsADirectoryError(), False),
        (ValueError("a mistake of ours"), False),
        (of_obstore("GenericError", "503 SlowDown"), True),
        (of_obstore("GenericError", "404: NoSuchBucket"), False),
        (of_obstore("NotFoundError"), False),
        (of_obstore("PermissionDeniedError"), False),
        (of_obstore("UnauthenticatedError"), False),
        (of_obstore("UnknownConfigurationKeyError"), False),
        (of_obstore("GenericError", "Generic MicrosoftAzure error: Account must be specified"), False),
    ],
    ids=repr,
)
def test_what_will_not_pass_by_itself_is_not_tried_again(error: Exception, may: bool) -> None:
    assert may_pass(error) == may


def test_errors_of_the_library_become_errors_of_files_and_ours_stay() -> None:
    def fail(error: Exception) -> None:
        raise error

    with pytest.raises(OSError, match=r"^NotFoundError: no such key$"):
        patiently(fail, of_obstore("NotFoundError", "no such key\nand more"))
    with pytest.raises(ValueError, match="a mistake of ours"):
        patiently(fail, ValueError("a mistake of ours"))


@pytest.mark.parametrize(
    ("message", "variable"),
    [
        ("Generic S3 error: Error performing PUT http://169.254.169.254/latest/api/token", "AWS_ACCESS_KEY_ID"),
        (
            "Generic GCS error: Error performing token request: Error performing GET http://169.254.169.254/compute",
            "GOOGLE_APPLICATION_CREDENTIALS",
        ),
        ("Generic MicrosoftAzure error: Account must be specified", "AZURE_STORAGE_ACCOUNT_NAME"),
    ],
)
def test_without_credentials_the_variables_to_set_are_named(message: str, variable: str) -> None:
    def fail() -> None:
        raise of_obstore("GenericError", message)

    with pytest.raises(OSError, match=f"^there are no credentials: set {variable}"):
        patiently(fail)


def test_an_address_of_no_known_kind_is_a_message() -> None:
    with pytest.raises(UserError, match="nonsense"):
        CheckpointStore("nonsense://bucket/run").steps()


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [("s3", install_command("s3")), ("gs", install_command("s3")), ("sftp", "install it")],
)
def test_an_address_whose_library_is_missing_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, kind: str, remedy: str
) -> None:
    def missing(kind: str) -> None:
        raise ImportError("its library", name="its library")

    monkeypatch.setattr("obstore.fsspec.register", missing)
    monkeypatch.setattr("fsspec.filesystem", missing)
    with pytest.raises(UserError, match=re.escape(f"{kind}://bucket/run needs its library: {remedy}") + "$"):
        CheckpointStore(f"{kind}://bucket/run").steps()
