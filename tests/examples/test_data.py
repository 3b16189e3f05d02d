"""`examples/data.py`: the published records, and what happens where a file is missing or altered."""

import gzip
import os
import pathlib

import data
import numpy as np
import pytest

DATA = os.environ.get("TFP_DPVI_DATA", "")

real_data = pytest.mark.skipif(
    not pathlib.Path(DATA, "adult").is_dir(),
    reason="no real data: TFP_DPVI_DATA names no folder with them",
)


@pytest.fixture(scope="module")
def adult():
    return data.load_adult()


@pytest.fixture
def downloads(monkeypatch, tmp_path):
    """An empty data folder, and what Keras is asked to download into `files`."""
    calls = []

    def get_file(name, url, **kwargs):
        calls.append((name, url, kwargs))
        if not (tmp_path / name).is_file():
            raise Exception("no network")
        return str(tmp_path / name)

    monkeypatch.setenv("TFP_DPVI_DATA", str(tmp_path / "empty"))
    monkeypatch.setattr(data.keras.utils, "get_file", get_file)
    return calls


@real_data
def test_adult_ordinal(adult):
    assert (adult.x.shape, adult.x.dtype) == ((48842, 14), np.float32)
    assert (adult.y.shape, adult.y.dtype) == ((48842,), np.int32)
    # The data file comes first, the test file after it.
    assert np.bincount(adult.y[:32561]).tolist() == [24720, 7841]
    assert np.bincount(adult.y[32561:]).tolist() == [12435, 3846]
    first = dict(zip(adult.feature_names, adult.x[0].tolist(), strict=True))
    # State-gov is the eighth in sorted order.
    assert [first[name] for name in ("age", "fnlwgt", "workclass", "sex")] == [39, 77516, 7, 1]


@real_data
def test_adult_question_mark_is_a_category_of_its_own(adult):
    columns = [
        adult.feature_names.index(name) for name in ("workclass", "occupation", "native-country")
    ]
    unknown = (adult.x[:, columns] == 0).any(axis=1)
    assert unknown[:32561].sum() == 2399
    assert unknown[32561:].sum() == 1221


@real_data
def test_adult_one_hot(adult):
    one_hot = data.load_adult("one_hot")
    assert one_hot.x.shape == (48842, 108)
    assert len(set(one_hot.feature_names)) == 108
    np.testing.assert_array_equal(one_hot.y, adult.y)
    attributes = np.array([name.split("=")[0] for name in one_hot.feature_names])
    for column, attribute in enumerate(adult.feature_names):
        block = one_hot.x[:, attributes == attribute]
        if block.shape[1] == 1:
            np.testing.assert_array_equal(block[:, 0], adult.x[:, column])
        else:
            assert set(np.unique(block)) == {0.0, 1.0}  # Every category occurs.
            np.testing.assert_array_equal(block.sum(axis=1), 1)
            np.testing.assert_array_equal(block.argmax(axis=1), adult.x[:, column])


@real_data
@pytest.mark.parametrize(("encoding", "width"), [("ordinal", 8), ("one_hot", 10)])
def test_abalone(encoding, width):
    abalone = data.load_abalone(encoding)
    assert (abalone.x.shape, abalone.x.dtype) == ((4177, width), np.float32)
    assert len(abalone.feature_names) == width
    assert np.bincount(abalone.y).tolist() == [2096, 2081]
    assert (abalone.x[:, abalone.feature_names.index("height")] == 0).sum() == 2
    sexes = abalone.x[:, 0].astype(int) if width == 8 else abalone.x[:, :3].argmax(axis=1)
    assert np.bincount(sexes).tolist() == [1307, 1342, 1528]  # F, I, M


@real_data
@pytest.mark.parametrize(
    ("load", "mean", "std"),
    [(data.load_mnist, 0.1307, 0.3081), (data.load_fashion_mnist, 0.2860, 0.3530)],
)
def test_images(load, mean, std):
    train, test = load(), load("test")
    assert (train.x.shape, train.x.dtype, train.y.dtype) == ((60000, 28, 28), np.float32, np.int32)
    assert (train.x.min(), train.x.max()) == (0, 1)
    assert train.x.mean(dtype=np.float64) == pytest.approx(mean, abs=5e-5)
    assert train.x.std(dtype=np.float64) == pytest.approx(std, abs=5e-5)
    assert test.x.shape == (10000, 28, 28)
    assert sorted(np.unique(test.y)) == list(range(10))


@real_data
@pytest.mark.parametrize(
    ("load", "encoding", "orientation", "tolerance"),
    [
        (data.load_adult, "ordinal", 0.8226, 0.005),
        (data.load_adult, "one_hot", 0.8524, 0.005),
        # The accuracy of single splits has a standard deviation of 0.014 about 0.788.
        (data.load_abalone, "ordinal", 0.784, 0.005),
        (data.load_abalone, "one_hot", 0.784, 0.005),
    ],
)
def test_non_private_logistic_regression(load, encoding, orientation, tolerance):
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import train_test_split
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    table = load(encoding)
    scores = []
    for seed in range(2 if len(table.x) > 10000 else 10):
        x, x_test, y, y_test = train_test_split(table.x, table.y, test_size=0.2, random_state=seed)
        model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000)).fit(x, y)
        scores.append(model.score(x_test, y_test))
    assert np.mean(scores) == pytest.approx(orientation, abs=tolerance)


@real_data
def test_a_download_goes_through_keras_with_the_checksum(downloads, tmp_path):
    packed = pathlib.Path(DATA, "abalone", "abalone.data.gz").read_bytes()
    (tmp_path / "abalone.data").write_bytes(gzip.decompress(packed))
    assert len(data.load_abalone().x) == 4177
    [(name, url, kwargs)] = downloads
    assert name == "abalone.data"
    assert url.startswith("https://archive.ics.uci.edu/")
    assert kwargs["cache_subdir"] == "datasets/abalone"
    assert kwargs["hash_algorithm"] == "sha256"
    assert kwargs["file_hash"].startswith("de37cdcd")


@pytest.mark.parametrize(
    "load", [data.load_adult, data.load_abalone, data.load_mnist, data.load_fashion_mnist]
)
def test_a_missing_file_names_the_place_and_the_fix(load, downloads, tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        load()
    for part in (str(tmp_path / "empty"), "no network", "https://", "TFP_DPVI_DATA"):
        assert part in str(caught.value)


@pytest.mark.parametrize("name", ["abalone.data", "abalone.data.gz"])
def test_an_altered_file_is_refused(name, downloads, tmp_path):
    (tmp_path / "empty" / "abalone").mkdir(parents=True)
    content = b"F,1,1,1,1,1,1,1,5\n"
    (tmp_path / "empty" / "abalone" / name).write_bytes(
        gzip.compress(content) if name.endswith("gz") else content
    )
    with pytest.raises(ValueError, match="differs from the published file"):
        data.load_abalone()
    assert not downloads


def test_an_unknown_category_or_encoding_is_refused(monkeypatch):
    monkeypatch.setattr(data, "_published", lambda *_: b"F,1,1,1,1,1,1,1,5\nX,1,1,1,1,1,1,1,15\n")
    with pytest.raises(ValueError, match="sex holds a category"):
        data.load_abalone()
    with pytest.raises(ValueError, match="encoding='hot' is unknown: pass 'ordinal' or 'one_hot'"):
        data.load_abalone("hot")
