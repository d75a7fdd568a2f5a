"""The resources that a run holds until its end."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType

from skyrl.runs.inputs import notice


class HeldResources(ExitStack[bool | None]):
    """An `ExitStack` whose callbacks do not replace the error that ends the run: theirs is reported before it.

    Cleaning up often fails for the same cause, such as a lack of file descriptors, with a message that says less.
    """

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        """Release everything, latest first. Raises the error of a callback if the run itself did not fail."""
        try:
            return super().__exit__(kind, error, trace)
        except Exception as later:
            if error is None or later is error:
                raise
            notice(f"Cleaning up failed, too: {type(later).__name__}: {later}")
            return False
