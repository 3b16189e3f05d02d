"""TensorFlow's warnings as failures (C9)."""

import contextlib
import logging


class _Collect(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


@contextlib.contextmanager
def no_fallback():
    """Fails if `tf.vectorized_map` says that it runs a while loop instead of a vectorised operation."""
    collect = _Collect()
    logger = logging.getLogger("tensorflow")
    logger.addHandler(collect)
    level = logger.level
    logger.setLevel(logging.WARNING)  # Whatever ran before may have silenced it.
    try:
        yield
    finally:
        logger.removeHandler(collect)
        logger.setLevel(level)
    fallbacks = [message for message in collect.messages if "while_loop" in message]
    assert not fallbacks, fallbacks
