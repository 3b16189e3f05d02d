"""Public data sets of the examples and benchmarks: Adult, Abalone, MNIST and Fashion-MNIST.

A file is read from the folder in `TFP_DPVI_DATA` (`adult/adult.data` or `adult/adult.data.gz`), or else downloaded into Keras's
cache. Its sha256 is checked in both cases.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import pathlib
from typing import Any, NamedTuple

import numpy as np

from tfp_dpvi import keras


class Dataset(NamedTuple):
    """Records in order: x float32 [n, ...], y int32 [n], and the names of a table's columns."""

    x: np.ndarray
    y: np.ndarray
    feature_names: tuple[str, ...] = ()


def load_adult(encoding: str = "ordinal") -> Dataset:
    """Loads UCI Adult (label: income above 50,000 dollars a year): the 32561 training records, then the 16281 test records.

    "ordinal" has 14 columns, with categories as indices in sorted order; "one_hot" has 108. A missing value, "?", is a
    separate category. Nothing is scaled.
    """
    frame = _table(
        [_published("adult", f"{_UCI}/adult/{name}", sha256) for name, sha256 in _ADULT_FILES],
        _ADULT,
    )
    return _encoded(
        frame, frame["label"].str.startswith(">50K"), _ADULT, encoding
    )  # A test label ends in a period.


def load_abalone(encoding: str = "ordinal") -> Dataset:
    """Loads UCI Abalone (label: at least 10 rings): 4177 records with 8 columns, or 10 with "one_hot" sex."""
    frame = _table(
        [_published("abalone", f"{_UCI}/abalone/abalone.data", _ABALONE_SHA256)], _ABALONE
    )
    return _encoded(frame, frame["label"] >= 10, _ABALONE, encoding)


def load_mnist(split: str = "train") -> Dataset:
    """Loads handwritten digits: x [60000, 28, 28] for "train" or [10000, 28, 28] for "test", from 0 (paper) to 1 (ink)."""
    return _images("mnist", "https://storage.googleapis.com/cvdf-datasets/mnist", _MNIST[split])


def load_fashion_mnist(split: str = "train") -> Dataset:
    """Loads images of clothing, with MNIST's shapes."""
    return _images(
        "fashion-mnist",
        "https://storage.googleapis.com/tensorflow/tf-keras-datasets",
        _FASHION_MNIST[split],
    )


def _published(folder: str, url: str, sha256: str) -> bytes:
    """Returns a file as its publisher serves it."""
    name = url.rsplit("/", 1)[1]
    local = pathlib.Path(os.environ.get("TFP_DPVI_DATA") or "no-such-folder", folder)
    for path in (local / name, local / f"{name}.gz"):
        if path.is_file():
            content = path.read_bytes() if path.name == name else gzip.decompress(path.read_bytes())
            if hashlib.sha256(content).hexdigest() != sha256:
                raise ValueError(
                    f"{path} differs from the published file (sha256): download {url} again."
                )
            return content
    cache = {"cache_subdir": f"datasets/{folder}", "file_hash": sha256, "hash_algorithm": "sha256"}
    try:
        return pathlib.Path(keras.utils.get_file(name, url, **cache)).read_bytes()
    except Exception as error:  # Keras raises a bare Exception where a URL fails.
        raise FileNotFoundError(
            f"{name} is not in {local} and cannot be downloaded ({error}).\n"
            f"Download {url} and set TFP_DPVI_DATA to a folder with {folder}/{name}."
        ) from error


def _table(files: list[bytes], schema: dict[str, str]) -> Any:
    import pandas

    kwargs: Any = {
        "names": [*schema, "label"],
        "skipinitialspace": True,
        "comment": "|",
        "keep_default_na": False,
    }
    return pandas.concat(
        [pandas.read_csv(io.BytesIO(file), **kwargs) for file in files], ignore_index=True
    )


def _encoded(frame: Any, label: Any, schema: dict[str, str], encoding: str) -> Dataset:
    if encoding not in ("ordinal", "one_hot"):
        raise ValueError(f"encoding={encoding!r} is unknown: pass 'ordinal' or 'one_hot'.")
    columns, names = [], []
    for name, listed in schema.items():
        values, categories = frame[name].to_numpy(), listed.split()
        if categories:
            # The categories are public constants: which columns a model sees must not depend on the records.
            matches = values[:, np.newaxis] == np.array(categories, object)
            if not matches.any(axis=1).all():
                raise ValueError(f"{name} holds a category that is not one of {categories}.")
            values = matches if encoding == "one_hot" else matches.argmax(axis=1)
        columns.append(values.reshape(len(frame), -1).astype(np.float32))
        names += (
            [f"{name}={category}" for category in categories]
            if columns[-1].shape[1] > 1
            else [name]
        )
    return Dataset(np.concatenate(columns, axis=1), label.to_numpy(np.int32), tuple(names))


def _images(folder: str, base: str, files: tuple[tuple[str, str], tuple[str, str]]) -> Dataset:
    (images, images_sha256), (labels, labels_sha256) = files
    x = gzip.decompress(_published(folder, f"{base}/{images}-ubyte.gz", images_sha256))
    y = gzip.decompress(_published(folder, f"{base}/{labels}-ubyte.gz", labels_sha256))
    pixels = np.frombuffer(x, np.uint8, offset=16).reshape(
        -1, 28, 28
    )  # The idx format: 16 bytes of header, 8 for labels.
    return Dataset(
        pixels.astype(np.float32) / np.float32(255),
        np.frombuffer(y, np.uint8, offset=8).astype(np.int32),
    )


_UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases"
_ADULT_FILES = (
    ("adult.data", "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d"),
    ("adult.test", "a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05"),
)
_ABALONE_SHA256 = "de37cdcdcaaa50c309d514f248f7c2302a5f1f88c168905eba23fe2fbc78449f"
_MNIST = {
    "train": (
        ("train-images-idx3", "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
        ("train-labels-idx1", "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
    ),
    "test": (
        ("t10k-images-idx3", "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
        ("t10k-labels-idx1", "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
    ),
}
_FASHION_MNIST = {
    "train": (
        ("train-images-idx3", "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
        ("train-labels-idx1", "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
    ),
    "test": (
        ("t10k-images-idx3", "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
        ("t10k-labels-idx1", "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
    ),
}

# The categories of each attribute in sorted order; none for a number.
_ADULT = {
    "age": "",
    "workclass": "? Federal-gov Local-gov Never-worked Private Self-emp-inc Self-emp-not-inc State-gov Without-pay",
    "fnlwgt": "",
    "education": "10th 11th 12th 1st-4th 5th-6th 7th-8th 9th Assoc-acdm Assoc-voc Bachelors Doctorate HS-grad Masters "
    "Preschool Prof-school Some-college",
    "education-num": "",
    "marital-status": "Divorced Married-AF-spouse Married-civ-spouse Married-spouse-absent Never-married Separated Widowed",
    "occupation": "? Adm-clerical Armed-Forces Craft-repair Exec-managerial Farming-fishing Handlers-cleaners "
    "Machine-op-inspct Other-service Priv-house-serv Prof-specialty Protective-serv Sales Tech-support Transport-moving",
    "relationship": "Husband Not-in-family Other-relative Own-child Unmarried Wife",
    "race": "Amer-Indian-Eskimo Asian-Pac-Islander Black Other White",
    "sex": "Female Male",
    "capital-gain": "",
    "capital-loss": "",
    "hours-per-week": "",
    "native-country": "? Cambodia Canada China Columbia Cuba Dominican-Republic Ecuador El-Salvador England France Germany "
    "Greece Guatemala Haiti Holand-Netherlands Honduras Hong Hungary India Iran Ireland Italy Jamaica Japan Laos Mexico "
    "Nicaragua Outlying-US(Guam-USVI-etc) Peru Philippines Poland Portugal Puerto-Rico Scotland South Taiwan Thailand "
    "Trinadad&Tobago United-States Vietnam Yugoslavia",
}
_ABALONE = dict.fromkeys(
    (
        "sex",
        "length",
        "diameter",
        "height",
        "whole weight",
        "shucked weight",
        "viscera weight",
        "shell weight",
    ),
    "",
) | {"sex": "F I M"}
