"""MNIST and Fashion-MNIST: images in the idx format."""

from __future__ import annotations

import math
import pathlib
from typing import Literal

import numpy as np
import numpy.typing as npt

from tfp_dpvi.datasets._files import Dataset, PathLike, PublishedFile, check_choice, read

Split = Literal["train", "test"]


def load_mnist(path: PathLike | None = None, split: Split = "train", *, verify_checksum: bool = True) -> Dataset:
    """Loads MNIST: handwritten digits.

    Args:
      path: a folder with the four `...-ubyte.gz` files; for the default see the module.
      split: `"train"`, 60000 images, or `"test"`, 10000.
      verify_checksum: `False` accepts an altered copy, such as an extract.

    Returns:
      A `Dataset`: `x` float32 `[n, 28, 28]`, from 0 (paper) to 1 (ink); `y` int32 `[n]`, the digit.

    Raises:
      FileNotFoundError: a file is in none of the places and can't be downloaded.
      ValueError: `split` is unknown, a checksum differs, or a file is malformed.
    """
    return _load("MNIST, handwritten digits", _MNIST, path, split, verify_checksum)


def load_fashion_mnist(
    path: PathLike | None = None, split: Split = "train", *, verify_checksum: bool = True
) -> Dataset:
    """Loads Fashion-MNIST (MIT licence): articles of clothing.

    Args:
      path: a folder with the four `...-ubyte.gz` files; for the default see the module.
      split: `"train"`, 60000 images, or `"test"`, 10000.
      verify_checksum: `False` accepts an altered copy, such as an extract.

    Returns:
      A `Dataset`: `x` float32 `[n, 28, 28]`, from 0 (background) to 1; `y` int32 `[n]`, the class,
      from 0 (T-shirt/top) to 9 (ankle boot).

    Raises:
      FileNotFoundError: a file is in none of the places and can't be downloaded.
      ValueError: `split` is unknown, a checksum differs, or a file is malformed.
    """
    return _load("Fashion-MNIST, clothing", _FASHION_MNIST, path, split, verify_checksum)


def _load(
    title: str,
    files: dict[str, tuple[PublishedFile, PublishedFile]],
    path: PathLike | None,
    split: Split,
    verify: bool,
) -> Dataset:
    check_choice("split", split, tuple(files))
    images_file, labels_file = files[split]
    images = _idx(*read(images_file, path, verify), dimensions=3)
    labels = _idx(*read(labels_file, path, verify), dimensions=1)
    if len(images) != len(labels):
        raise ValueError(
            f"{images_file.name} has {len(images)} images and {labels_file.name} {len(labels)} "
            "labels; they do not belong together."
        )
    return Dataset(
        images.astype(np.float32) / np.float32(255),
        labels.astype(np.int32),
        (),
        f"{title}, {split} images as published; pixels divided by 255.",
    )


def _idx(content: bytes, where: pathlib.Path, dimensions: int) -> npt.NDArray[np.uint8]:
    """Reads an array of unsigned bytes: magic 0, 0, 8, rank; the sizes; the values."""
    start = 4 * (1 + dimensions)
    if len(content) < start or content[:4] != bytes((0, 0, 8, dimensions)):
        raise ValueError(f"{where} is not an idx file of unsigned bytes of rank {dimensions}.")
    shape = tuple(int(size) for size in np.frombuffer(content, ">u4", dimensions, offset=4))
    if len(content) - start != math.prod(shape):
        raise ValueError(f"{where} holds {len(content) - start} values, but its header says {shape}.")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def _files(folder: str, base: str, *sha256: str) -> dict[str, tuple[PublishedFile, PublishedFile]]:
    def file(name: str, checksum: str) -> PublishedFile:
        return PublishedFile(folder, f"{base}/{name}-ubyte.gz", checksum)

    return {
        "train": (file("train-images-idx3", sha256[0]), file("train-labels-idx1", sha256[1])),
        "test": (file("t10k-images-idx3", sha256[2]), file("t10k-labels-idx1", sha256[3])),
    }


# Keras itself publishes MNIST only as its own .npz; these are the original files.
_MNIST = _files(
    "mnist",
    "https://storage.googleapis.com/cvdf-datasets/mnist",
    "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
)
_FASHION_MNIST = _files(
    "fashion-mnist",
    "https://storage.googleapis.com/tensorflow/tf-keras-datasets",
    "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
    "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
    "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
    "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
)
