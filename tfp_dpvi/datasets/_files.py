"""Finding, downloading and checking the published files."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import os
import pathlib
import zlib
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

PathLike = str | os.PathLike[str]

ENVIRONMENT_VARIABLE = "TFP_DPVI_DATA"


class Dataset(NamedTuple):
    """Records in order, one per row.

    Attributes:
      x: float32, `[n, ...]`.
      y: int32, `[n]`.
      feature_names: the columns of a table; empty for images.
      description: what the data are and how they were encoded.
    """

    x: npt.NDArray[np.float32]
    y: npt.NDArray[np.int32]
    feature_names: tuple[str, ...]
    description: str


@dataclasses.dataclass(frozen=True)
class PublishedFile:
    """A file as its publisher serves it.

    Attributes:
      folder: its sub-folder in a data folder and in Keras's cache.
      url: where it is downloaded from; the last part is its name.
      sha256: checksum of the file as it is served.
      sha256_gz: checksum of a compressed copy, where the served file is not compressed.
    """

    folder: str
    url: str
    sha256: str
    sha256_gz: str | None = None

    @property
    def name(self) -> str:
        return self.url.rsplit("/", 1)[1]

    def checksums(self) -> dict[str, str]:
        """The names it goes by, each with its checksum."""
        names = {self.name: self.sha256}
        if self.sha256_gz is not None:
            names[f"{self.name}.gz"] = self.sha256_gz
        return names


def read(file: PublishedFile, path: PathLike | None, verify: bool) -> tuple[bytes, pathlib.Path]:
    """Finds a file, checks it and unpacks it.

    Returns:
      The uncompressed content, and where it was found.

    Raises:
      FileNotFoundError: it is in none of the places and can't be downloaded.
      ValueError: its checksum differs, or it can't be unpacked.
    """
    where = _find(file, path)
    content = where.read_bytes()
    if verify:
        found, expected = hashlib.sha256(content).hexdigest(), file.checksums()[where.name]
        if found != expected:
            raise ValueError(
                f"{where} has sha256 {found}, not {expected} as published. Delete it or fetch it "
                "again; to read an altered copy on purpose, pass verify_checksum=False."
            )
    if where.suffix == ".gz":
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{where} can't be unpacked: {error}. Fetch it again.") from error
    return content, where


def _find(file: PublishedFile, path: PathLike | None) -> pathlib.Path:
    places: list[tuple[str, pathlib.Path]] = []
    if path is not None:
        places.append(("path", pathlib.Path(path).expanduser()))
    else:
        named = os.environ.get(ENVIRONMENT_VARIABLE)
        if named:
            places.append((ENVIRONMENT_VARIABLE, pathlib.Path(named).expanduser()))
        places.append(("Keras's cache", pathlib.Path("~/.keras/datasets").expanduser()))
    for _, place in places:
        for folder in (place / file.folder, place):
            for name in file.checksums():
                if (folder / name).is_file():
                    return folder / name

    failure: Exception | None = None
    if path is None:
        try:
            return _download(file)
        except Exception as error:  # Keras raises a bare Exception where a URL fails.
            failure = error
    looked = "; ".join(f"{label}: {place}" for label, place in places)
    names = " or ".join(file.checksums())
    raise FileNotFoundError(
        f"{file.folder}: {names} was not found. Looked in {looked}"
        + ("" if failure is None else f"; then the download failed: {failure}")
        + f". Fetch {file.url} and name its folder with path= or the environment variable "
        f"{ENVIRONMENT_VARIABLE}."
    ) from failure


def _download(file: PublishedFile) -> pathlib.Path:
    from tfp_dpvi._tf import keras  # Reading a local file needs no TensorFlow.

    get_file: Any = keras.utils.get_file
    return pathlib.Path(
        get_file(
            file.name,
            origin=file.url,
            cache_subdir=f"datasets/{file.folder}",
            file_hash=file.sha256,
            hash_algorithm="sha256",
        )
    )


def check_choice(argument: str, value: object, choices: tuple[str, ...]) -> None:
    """Raises `ValueError` unless `value` is one of `choices`."""
    if value not in choices:
        known = " or ".join(repr(choice) for choice in choices)
        raise ValueError(f"{argument}={value!r} is not known; pass {known}.")
