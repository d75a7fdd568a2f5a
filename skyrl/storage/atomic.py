"""Files and folders that are written beside their place and renamed at the end.

Whoever looks, and whatever ends the writer, finds the old content or the new one, never a part or a mixture. What a
killed writer left beside the place is removed by the next one. Every command that writes a result uses this module.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path

from skyrl.errors import UserError
from skyrl.storage.disk import flush
from skyrl.storage.modes import follow_umask


@contextmanager
def atomic_file(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """A file beside `path` to write to, which replaces it when the block ends, and is removed if the block raises.

    A symbolic link keeps pointing to the file; a device or a pipe, such as `/dev/stdout`, is written to directly.
    `durable`: the content is on the disk before it gets its name. Raises `OSError`.
    """
    if not _is_replaceable(path):
        yield path
        return
    path = path.resolve()
    scratch = _state_path(path, "new")
    try:
        yield scratch
        if durable:
            flush(scratch)
        scratch.replace(path)
        if durable:
            flush(path.parent)
    finally:
        scratch.unlink(missing_ok=True)


def write_file(path: Path, content: str | bytes, *, durable: bool = True) -> None:
    """Replace a file atomically; text is encoded as UTF-8. See `atomic_file`."""
    with atomic_file(path, durable=durable) as scratch:
        scratch.write_bytes(content.encode() if isinstance(content, str) else content)


def write_files(contents: Mapping[Path, str]) -> None:
    """Replace files that belong together, so that an old one is never beside a new one. Raises `OSError`.

    All are complete before the first is replaced; the old ones are removed before the first new one gets its name.
    """
    scratches = {path: _state_path(path.resolve(), "new") for path in contents if _is_replaceable(path)}
    try:
        for path, text in contents.items():
            scratch = scratches.get(path, path)
            scratch.write_text(text, encoding="utf-8")
            if path in scratches:
                flush(scratch)
        if len(contents) > 1:
            for path in scratches:
                path.resolve().unlink(missing_ok=True)
        for path, scratch in scratches.items():
            scratch.replace(path.resolve())
    finally:
        for scratch in scratches.values():
            scratch.unlink(missing_ok=True)


@contextmanager
def atomic_folder(folder: Path, *, keep: Collection[str] = ()) -> Iterator[Path]:
    """A new folder to write to, which takes the place of `folder` when the block ends. Its content is made durable.

    If the block raises, the old folder stays as it is, and what was written is removed, but for the names in `keep`,
    such as logs that the error names. Raises `OSError`, and `UserError` while another process writes the same folder.

    A folder that cannot be renamed (a mount point, the current folder of a shell, a folder in one that is read-only) is
    filled in place: what it holds is removed once the new content is complete.
    """
    folder = folder.resolve()
    old = _state_path(folder, "old")
    in_place = folder.exists() and (
        folder.samefile(Path.cwd()) or folder.is_mount() or not os.access(folder.parent, os.W_OK)
    )
    scratch = folder / ".new" if in_place else _state_path(folder, "new")
    if old.exists() and not folder.exists():  # a writer was killed between the two renames
        old.rename(folder)
    with _reserved(folder, scratch):
        _clear(scratch)
        try:
            yield scratch
            follow_umask(scratch)
            for parent, _, names in os.walk(scratch):
                for name in names:
                    flush(Path(parent, name))
                flush(Path(parent))
            if in_place:
                _clear(folder, keep=(scratch.name,))
                for path in list(scratch.iterdir()):
                    path.rename(folder / path.name)
                scratch.rmdir()
            else:
                shutil.rmtree(old, ignore_errors=True)
                if folder.exists():
                    folder.rename(old)
                scratch.rename(folder)
                shutil.rmtree(old, ignore_errors=True)
            flush(folder.parent)
        except BaseException:
            with suppress(OSError):
                _clear(scratch, keep)
                scratch.rmdir()  # unless something is kept in it
            raise


def is_being_written(folder: Path) -> bool:
    """Whether a living process writes a folder with `atomic_folder`."""
    scratch = _state_path(folder.resolve(), "new")
    if not scratch.exists():
        return False
    try:
        with _reserved(folder, scratch):
            return False
    except UserError:
        return True


def refuse_other_files(folder: Path, known: Collection[str]) -> None:
    """Raises `UserError` if a folder that will be replaced holds anything but names and patterns in `known`."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    others = [name for name in names if name != ".new" and not any(fnmatch(name, pattern) for pattern in known)]
    if others:
        listed = ", ".join(others[:3]) + (" ..." if len(others) > 3 else "")
        raise UserError(f"{folder} holds {listed}: it would be replaced as a whole; choose a folder of its own")


@contextmanager
def _reserved(folder: Path, scratch: Path) -> Iterator[None]:
    """The scratch folder, made if missing, locked as long as this process lives."""
    scratch.mkdir(parents=True, exist_ok=True)
    handle = os.open(scratch, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another process writes {folder}: wait for it, or choose another folder") from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(handle)


def _clear(folder: Path, keep: Collection[str] = ()) -> None:
    """Remove everything in a folder but the names in `keep`."""
    for path in folder.iterdir():
        if path.name in keep:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _state_path(path: Path, state: str) -> Path:
    return path.with_name(f".{path.name}.{state}")


def _is_replaceable(path: Path) -> bool:
    """Whether a path names nothing yet, or a regular file that can be renamed: no device, pipe or mounted file."""
    if not path.exists():
        return True
    in_kernel = any(path.absolute().is_relative_to(item) for item in ("/dev", "/proc"))
    return path.is_file() and not in_kernel and not path.is_mount() and os.access(path.resolve().parent, os.W_OK)
