"""Object stores through fsspec: `s3://`, `gs://`, `memory://` and every other protocol that fsspec knows. Keys and
endpoints come from the environment variables that the store's own tools read (`AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT_URL`,
...).

An object store cannot move a folder, and never holds half of an object: an object exists once its upload has ended.
Temporary failures, such as an overloaded server or a lost connection, are retried after random pauses that grow; final
ones, such as a missing object or a refused key, are raised at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import Any, TypeVar

import fsspec
from attrs import frozen
from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from skyrl.errors import UserError
from skyrl.installation import install_command
from skyrl.storage.disk import CHUNK, Bytes, FileFacts

T = TypeVar("T")

ATTEMPTS = 8
LONGEST_PAUSE = 20.0
"""Longest pause between two attempts, in seconds; the first pauses are below half a second."""

_BY_OBSTORE = ("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az")
_FINAL = (FileNotFoundError, PermissionError, FileExistsError, NotADirectoryError, IsADirectoryError)
_FINAL_OF_OBSTORE = {"NotFoundError", "PermissionDeniedError", "UnauthenticatedError", "UnknownConfigurationKeyError"}

_KEYS = {
    "S3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_ENDPOINT_URL for a server of your own)",
    "GCS": "GOOGLE_APPLICATION_CREDENTIALS to the file of a service account",
    "MicrosoftAzure": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
"""Environment variables with the credentials of an object store, by its name in messages of obstore."""

_LACKS_KEYS = ("http://169.254.169.254/", "http://metadata.google.internal/", "Account must be specified")
"""Parts of the messages of obstore without credentials. It asks a cloud's machine for them at the first two."""


@frozen(slots=False)
class Bucket:
    """A folder of an object store, by its address."""

    address: str

    @property
    def where(self) -> str:
        return self.address

    @property
    def moves(self) -> bool:
        return False

    def names(self, folder: str = "") -> list[str]:
        path = self._path(folder).rstrip("/")
        try:
            entries = [str(item).rstrip("/") for item in self._ask(lambda system: system.ls(path, detail=False))]
        except FileNotFoundError:
            return []
        return sorted({name.rpartition("/")[2] for name in entries if name.strip("/") != path.strip("/")})

    def size(self, name: str) -> int:
        return self.facts(name).size

    def facts(self, name: str) -> FileFacts:
        return _facts(self._ask(lambda system: system.info(self._path(name))))

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytearray:
        if length == 0:
            return bytearray()
        end = None if length is None else start + length
        part = {} if (start, end) == (0, None) else {"start": start, "end": self.size(name) if end is None else end}
        return bytearray(patiently(partial(self._system.cat_file, **part), self._path(name)))

    def part(self, name: str, start: int, end: int) -> tuple[bytes, FileFacts]:
        """Bytes of a file from byte `start` up to byte `end`, and facts about the file that they are of. Raises
        `OSError`.
        """
        path, system = self._path(name), self._system
        if self._kind not in _BY_OBSTORE:
            return bytes(self.read(name, start, end - start)), self.facts(name)
        bucket, key = system._split_path(path)
        store = system._construct_store(bucket)

        def asked() -> tuple[bytes, FileFacts]:
            answer = store.get(key, options={"range": (start, end)})
            return bytes(answer.bytes()), _facts(answer.meta)

        return patiently(asked)

    def chunks(self, name: str, size: int | None = None) -> Iterator[Bytes]:
        size, step = self.size(name) if size is None else size, 16 * CHUNK
        for start in range(0, size, step):
            yield self.read(name, start, min(step, size - start))

    def write(self, name: str, content: Sequence[Bytes]) -> None:
        patiently(self._upload, self._path(name), content)

    def move(self, folder: str, to: str) -> None:
        raise AssertionError("an object store moves nothing")

    def remove(self, name: str) -> None:
        path = self._path(name)

        def deleted(system: Any) -> None:
            if system.exists(path):
                system.rm(path, recursive=True)

        self._ask(deleted)

    def flush(self, folder: str) -> None:
        """Does nothing: an uploaded object is durable."""

    def room(self) -> int | None:
        return None

    def __getstate__(self) -> dict[str, Any]:
        return {"address": self.address}

    @property
    def _kind(self) -> str:
        """The protocol of the address, such as `s3`."""
        return self.address.partition("://")[0]

    @cached_property
    def _system(self) -> Any:
        kind = self._kind
        try:
            if kind in _BY_OBSTORE:
                from obstore.fsspec import register

                register(kind)
            return fsspec.filesystem(kind)
        except ImportError as error:
            hint = install_command("s3") if kind in _BY_OBSTORE else "install it"
            raise UserError(f"{self.address} needs {error.name or error}: {hint}") from error
        except ValueError as error:
            raise UserError(f"{self.address}: {error}") from error

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        """An answer of the store as it is now, patiently: its file system object remembers what it has listed."""

        def asked() -> Any:
            self._system.invalidate_cache()
            return question(self._system)

        return patiently(asked)

    def _path(self, name: str) -> str:
        path: str = self._system._strip_protocol(f"{self.address}/{name}" if name else self.address)
        return path

    def _upload(self, path: str, content: Sequence[Bytes]) -> None:
        if len(content) == 1:
            self._system.pipe_file(path, bytes(content[0]))
            return
        file = self._system.open(path, "wb")
        try:
            for chunk in content:
                file.write(chunk)
        except BaseException:
            with suppress(AttributeError):
                file.closed = True  # closing would upload the part as if it were the whole
            raise
        file.close()


def _facts(about: Mapping[str, Any]) -> FileFacts:
    """Facts about an object, as its store describes it."""
    version = about.get("e_tag") or about.get("ETag") or about.get("last_modified") or about.get("created")
    return FileFacts(int(about["size"]), str(version))


def patiently(operation: Callable[..., T], *arguments: object) -> T:
    """Result of the operation, retried within the limit. Raises its last error, as an `OSError`."""
    try:
        return Retrying(
            retry=retry_if_exception(may_pass),
            stop=stop_after_attempt(ATTEMPTS),
            wait=wait_random_exponential(multiplier=0.1, max=LONGEST_PAUSE),
            reraise=True,
        )(operation, *arguments)
    except OSError:
        raise
    except Exception as error:
        if _is_of_obstore(error):
            message = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
            raise OSError(_missing_keys(error) or message) from error
        raise


def may_pass(error: BaseException) -> bool:
    """Whether the failure may be temporary, so that another attempt may succeed."""
    if isinstance(error, OSError):
        return not isinstance(error, _FINAL)
    final = type(error).__name__ in _FINAL_OF_OBSTORE or "NoSuchBucket" in str(error)
    return _is_of_obstore(error) and not final and _missing_keys(error) is None


def _missing_keys(error: BaseException) -> str | None:
    """Which variables to set if the error is that an object store was asked without credentials, else None."""
    message = str(error)
    if not any(part in message for part in _LACKS_KEYS):
        return None
    variables = next((_KEYS[name] for name in _KEYS if f"Generic {name} error" in message), "its keys")
    return f"there are no credentials: set {variables} in the environment"


def _is_of_obstore(error: BaseException) -> bool:
    return type(error).__module__.partition(".")[0] == "obstore"
