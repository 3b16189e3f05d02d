"""Adult and Abalone: tables of comma-separated fields.

The categories of an attribute are constants of this module and not read from the records: which
columns a model sees is public, whatever records are there.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Iterator
from typing import Literal

import numpy as np
import numpy.typing as npt

from tfp_dpvi.datasets._files import Dataset, PathLike, PublishedFile, check_choice, read

Encoding = Literal["ordinal", "one_hot"]

# An attribute's categories in sorted order, or None for a numeric attribute.
Schema = dict[str, tuple[str, ...] | None]


def load_adult(
    path: PathLike | None = None,
    encoding: Encoding = "ordinal",
    *,
    verify_checksum: bool = True,
) -> Dataset:
    """Loads UCI Adult (census income): does a person earn more than 50,000 dollars a year?

    All 48842 records: the 32561 of `adult.data`, then the 16281 of `adult.test`. A missing value,
    written `?`, is a category of its own. Nothing is scaled.

    Args:
      path: a folder with `adult.data` and `adult.test`; for the default see the module.
      encoding: `"ordinal"`: one column for each of the 14 attributes, a category being its index
        in sorted order (`?` comes first). `"one_hot"`: a column for each of the 102 categories (`?`
        included, none dropped) in the place of its attribute, 108 with the 6 numeric ones.
      verify_checksum: `False` accepts an altered copy, such as an extract.

    Returns:
      A `Dataset`: `x` float32 `[48842, 14]` or `[48842, 108]`; `y` int32 `[48842]`, 1 for more than
      50,000 dollars (11687 records).

    Raises:
      FileNotFoundError: a file is in none of the places and can't be downloaded.
      ValueError: `encoding` is unknown, a checksum differs, or a line is malformed.
    """
    check_choice("encoding", encoding, ("ordinal", "one_hot"))
    codes: list[list[float]] = []
    labels: list[bool] = []
    for file in _ADULT_FILES:
        content, where = read(file, path, verify_checksum)
        for number, fields in _records(content, where, len(_ADULT) + 1):
            label = fields[-1].removesuffix(".")  # Labels of the test file end in a period.
            if label not in ("<=50K", ">50K"):
                raise _malformed(where, number, f"the label is {label!r}, not '<=50K' or '>50K'")
            codes.append(_codes(fields, _ADULT, where, number))
            labels.append(label == ">50K")
    return _dataset(
        codes,
        labels,
        _ADULT,
        encoding,
        "UCI Adult (census income), data and test file in order; y = 1 for more than 50,000 "
        f"dollars a year; categories {encoding}, '?' is one of them.",
    )


def load_abalone(
    path: PathLike | None = None,
    encoding: Encoding = "ordinal",
    *,
    verify_checksum: bool = True,
) -> Dataset:
    """Loads UCI Abalone (CC BY 4.0): does a shell have at least 10 rings?

    All 4177 records. Two have a height of zero, as published. Nothing is scaled.

    Args:
      path: a folder with `abalone.data`; for the default see the module.
      encoding: of the sex, the first attribute. `"ordinal"`: one column, its index in sorted order
        (F 0, I for infant 1, M 2). `"one_hot"`: three columns in that order.
      verify_checksum: `False` accepts an altered copy, such as an extract.

    Returns:
      A `Dataset`: `x` float32 `[4177, 8]` or `[4177, 10]`; `y` int32 `[4177]`, 1 for 10 rings or
      more (2081 records).

    Raises:
      FileNotFoundError: the file is in none of the places and can't be downloaded.
      ValueError: `encoding` is unknown, the checksum differs, or a line is malformed.
    """
    check_choice("encoding", encoding, ("ordinal", "one_hot"))
    content, where = read(_ABALONE_FILE, path, verify_checksum)
    codes: list[list[float]] = []
    labels: list[bool] = []
    for number, fields in _records(content, where, len(_ABALONE) + 1):
        if not fields[-1].isdecimal():
            raise _malformed(where, number, f"rings is {fields[-1]!r}, not a count")
        codes.append(_codes(fields, _ABALONE, where, number))
        labels.append(int(fields[-1]) >= 10)
    return _dataset(
        codes,
        labels,
        _ABALONE,
        encoding,
        f"UCI Abalone (CC BY 4.0); y = 1 for 10 rings or more; sex {encoding}.",
    )


def _records(content: bytes, where: pathlib.Path, width: int) -> Iterator[tuple[int, list[str]]]:
    """Yields each record's line number and fields; passes over blank lines and Adult's headline."""
    try:
        text = content.decode("ascii")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not a text file: {error}.") from error
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or (number == 1 and line.startswith("|")):
            continue
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != width:
            raise _malformed(where, number, f"{len(fields)} fields instead of {width}")
        yield number, fields


def _codes(fields: list[str], schema: Schema, where: pathlib.Path, number: int) -> list[float]:
    """One number for each attribute: its value, or the index of its category."""
    codes = []
    for field, (name, categories) in zip(fields, schema.items(), strict=False):  # Label is last.
        try:
            code = float(field) if categories is None else float(categories.index(field))
        except ValueError:
            code = math.nan
        if not math.isfinite(code):
            wanted = "a number" if categories is None else f"one of {categories}"
            raise _malformed(where, number, f"{name} is {field!r}, not {wanted}")
        codes.append(code)
    return codes


def _malformed(where: pathlib.Path, number: int, problem: str) -> ValueError:
    return ValueError(f"{where}, line {number}: {problem}.")


def _dataset(
    codes: list[list[float]],
    labels: list[bool],
    schema: Schema,
    encoding: Encoding,
    description: str,
) -> Dataset:
    table = np.array(codes, np.float32).reshape(len(codes), len(schema))
    columns: list[npt.NDArray[np.float32]] = []
    names: list[str] = []
    for column, (name, categories) in zip(table.T, schema.items(), strict=True):
        if categories is None or encoding == "ordinal":
            columns.append(column[:, np.newaxis])
            names.append(name)
        else:
            columns.append(np.eye(len(categories), dtype=np.float32)[column.astype(np.int32)])
            names.extend(f"{name}={category}" for category in categories)
    return Dataset(np.concatenate(columns, axis=1), np.array(labels, np.int32), tuple(names), description)


_UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases"
_ADULT_FILES = (
    PublishedFile(
        "adult",
        f"{_UCI}/adult/adult.data",
        "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d",
        "c7a2b4716a97f930123e0baf879188d701e798172631a654fc703d4b082907f3",
    ),
    PublishedFile(
        "adult",
        f"{_UCI}/adult/adult.test",
        "a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05",
        "8a2c1bffa6e7ce5abfa43881ae5e87c4311ebc2b3cd526c9c40a43f19f06f799",
    ),
)
_ABALONE_FILE = PublishedFile(
    "abalone",
    f"{_UCI}/abalone/abalone.data",
    "de37cdcdcaaa50c309d514f248f7c2302a5f1f88c168905eba23fe2fbc78449f",
    "2dd1fc6d8805c24dc0cd4acd0cd091bcb559d99c982f32db7c1cc54d96f4940c",
)

_ADULT: Schema = {
    "age": None,
    "workclass": (
        "?",
        "Federal-gov",
        "Local-gov",
        "Never-worked",
        "Private",
        "Self-emp-inc",
        "Self-emp-not-inc",
        "State-gov",
        "Without-pay",
    ),
    "fnlwgt": None,
    "education": (
        "10th",
        "11th",
        "12th",
        "1st-4th",
        "5th-6th",
        "7th-8th",
        "9th",
        "Assoc-acdm",
        "Assoc-voc",
        "Bachelors",
        "Doctorate",
        "HS-grad",
        "Masters",
        "Preschool",
        "Prof-school",
        "Some-college",
    ),
    "education-num": None,
    "marital-status": (
        "Divorced",
        "Married-AF-spouse",
        "Married-civ-spouse",
        "Married-spouse-absent",
        "Never-married",
        "Separated",
        "Widowed",
    ),
    "occupation": (
        "?",
        "Adm-clerical",
        "Armed-Forces",
        "Craft-repair",
        "Exec-managerial",
        "Farming-fishing",
        "Handlers-cleaners",
        "Machine-op-inspct",
        "Other-service",
        "Priv-house-serv",
        "Prof-specialty",
        "Protective-serv",
        "Sales",
        "Tech-support",
        "Transport-moving",
    ),
    "relationship": ("Husband", "Not-in-family", "Other-relative", "Own-child", "Unmarried", "Wife"),
    "race": ("Amer-Indian-Eskimo", "Asian-Pac-Islander", "Black", "Other", "White"),
    "sex": ("Female", "Male"),
    "capital-gain": None,
    "capital-loss": None,
    "hours-per-week": None,
    "native-country": (
        "?",
        "Cambodia",
        "Canada",
        "China",
        "Columbia",
        "Cuba",
        "Dominican-Republic",
        "Ecuador",
        "El-Salvador",
        "England",
        "France",
        "Germany",
        "Greece",
        "Guatemala",
        "Haiti",
        "Holand-Netherlands",
        "Honduras",
        "Hong",
        "Hungary",
        "India",
        "Iran",
        "Ireland",
        "Italy",
        "Jamaica",
        "Japan",
        "Laos",
        "Mexico",
        "Nicaragua",
        "Outlying-US(Guam-USVI-etc)",
        "Peru",
        "Philippines",
        "Poland",
        "Portugal",
        "Puerto-Rico",
        "Scotland",
        "South",
        "Taiwan",
        "Thailand",
        "Trinadad&Tobago",
        "United-States",
        "Vietnam",
        "Yugoslavia",
    ),
}
_ABALONE: Schema = {
    "sex": ("F", "I", "M"),
    "length": None,
    "diameter": None,
    "height": None,
    "whole weight": None,
    "shucked weight": None,
    "viscera weight": None,
    "shell weight": None,
}
