"""Keep TensorFlow's native code from writing over the user's first line of output and progress bar.

TensorFlow 2.15 writes CUDA registration notices to file descriptor 2 while its shared libraries load, on machines
without a GPU too, and XLA greets its first compilation there. They come from C++, out of reach of `logging` and
`warnings`.
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
def quiet_native_import() -> Iterator[None]:
    """Drops what native code writes to stderr while TensorFlow loads; shows it after all if the import fails.

    Does nothing when TensorFlow is imported already or when the user has set `TF_CPP_MIN_LOG_LEVEL`: whoever sets it
    wants to see what it lets through.
    """
    if "tensorflow" in sys.modules or "TF_CPP_MIN_LOG_LEVEL" in os.environ:
        yield
        return
    # Information lines only (level 1): warnings and errors of later operations stay visible.
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "1"
    with _held_stderr(lambda text: b""):
        yield


@contextlib.contextmanager
def quiet_native_compile() -> Iterator[None]:
    """Drops XLA's known greetings from stderr while a step is compiled; any other line appears after it."""

    def without_chatter(text: bytes) -> bytes:
        lines = text.splitlines(keepends=True)
        return b"".join(line for line in lines if not any(known in line for known in _COMPILATION_CHATTER))

    with _held_stderr(without_chatter):
        yield
