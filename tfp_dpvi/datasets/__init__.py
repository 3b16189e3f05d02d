"""Loaders of public data sets for examples and benchmarks: Adult, Abalone, MNIST and Fashion-MNIST.

A file is looked for in the folder given as `path`, or else in the folder that the environment
variable `TFP_DPVI_DATA` names, then in Keras's cache (`~/.keras/datasets`), and is downloaded to
that cache last. Wherever it comes from, its sha256 is checked. A `path` is final: where it lacks a
file, the loader raises and looks nowhere else.

A folder holds the files as they are published (`adult.data`) or compressed (`adult.data.gz`),
directly or in a sub-folder named after the data set (`adult/adult.data.gz`).
"""

from __future__ import annotations

from tfp_dpvi.datasets._files import Dataset
from tfp_dpvi.datasets._images import load_fashion_mnist, load_mnist
from tfp_dpvi.datasets._tables import load_abalone, load_adult

__all__ = ["Dataset", "load_abalone", "load_adult", "load_fashion_mnist", "load_mnist"]
