"""Keep XLA's greetings out of the user's progress bar.

On its first compilation XLA writes a few lines to file descriptor 2. They come from C++, out of reach of `logging`,
`warnings` and `TF_CPP_MIN_LOG_LEVEL`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator

_COMPILATION_CHATTER = (
    b"All log messages before absl::InitializeLog() is called",
    b"Compiled cluster using XLA!",
    b"SetPriority unimplemented for this stream",
    b"StreamExecutor device",
    b"initialized for platform",
)


@contextlib.contextmanager
def _held_stderr(show: Callable[[bytes], bytes]) -> Iterator[None]:
    """Holds back file descriptor 2; afterwards writes what `show` leaves of it, and all of it if the body raised."""
    try:
        sys.stderr.flush()
        saved = os.dup(2)
    except (OSError, AttributeError, ValueError):  # No stderr at all (a windowed process): nothing to hold back.
        yield
        return
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        shown = None
        try:
            yield
        except BaseException:
            shown = bytes
            raise
        finally:
            with contextlib.suppress(OSError, AttributeError, ValueError):
                sys.stderr.flush()
            os.dup2(saved, 2)
            os.close(saved)
            held.seek(0)
            rest = (shown or show)(held.read())
            if rest:
                with contextlib.suppress(OSError):
                    os.write(2, rest)


@contextlib.contextmanager
def quiet_native_compile() -> Iterator[None]:
    """Drops XLA's known greetings from stderr while a step is compiled; any other line appears after it."""

    def without_chatter(text: bytes) -> bytes:
        lines = text.splitlines(keepends=True)
        return b"".join(line for line in lines if not any(known in line for known in _COMPILATION_CHATTER))

    with _held_stderr(without_chatter):
        yield
