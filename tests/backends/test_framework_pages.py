"""The pages about frameworks without a backend of their own, followed as a reader would: their own lines compare what
is served with what the framework answers by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from catboost import CatBoostClassifier, CatBoostError, CatBoostRegressor
from e2e_server import Server, serving
from page_commands import OF_FRAMEWORKS, ROOT, Reader, executed_blocks, files_of
from sklearn.datasets import load_wine

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One whose repository is empty, and which loads what it is asked to."""
    repository = tmp_path_factory.mktemp("models")
    state = tmp_path_factory.mktemp("state")
    with serving(repository, state, "--model-control-mode=explicit") as running:
        running.repository = repository  # type: ignore[attr-defined]
        yield running


@pytest.mark.parametrize("page", OF_FRAMEWORKS)
def test_a_reader_sees_what_the_page_shows(
    page: str, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "reader"
    places = {"http": server.http, "grpc": server.grpc, "metrics": server.metrics, "log_url": server.log_url}
    reader = Reader.of_server(folder, **places)
    monkeypatch.chdir(tmp_path)  # for python blocks; what runs in the reader's folder is ended
    for place in (folder, tmp_path):
        (place / "models").symlink_to(server.repository)  # type: ignore[attr-defined]
    text = (ROOT / page).read_text()
    assert files_of(text)
    wrong = reader.follow(text)
    assert not wrong, "\n\n".join(wrong) + server.log()


FEATURES, KINDS = load_wine(return_X_y=True)
QUICK: dict[str, Any] = {"iterations": 20, "verbose": False, "allow_writing_files": False}


@pytest.fixture
def save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, Path], None]:
    """The function of the page about CatBoost."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(executed_blocks((ROOT / "docs/howto/catboost.md").read_text())[0].text, names)
    saved: Callable[[Any, Path], None] = names["save"]
    return saved


def answers(path: Path, features: Any = FEATURES) -> list[Any]:
    """What the file answers, and that its shapes are those that it says."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(path, options)
    found: list[Any] = session.run(None, {"features": features.astype(np.float32)})
    for output, array in zip(session.get_outputs(), found, strict=True):
        assert output.shape == ["N", *array.shape[1:]]
    return found


def test_catboosts_onnx_files_answer_as_catboost_does(save: Callable[[Any, Path], None], tmp_path: Path) -> None:
    missing = FEATURES.copy()
    missing[::3, 2] = np.nan
    for labels in ((KINDS == 0).astype(int), np.array(["one", "two", "three"])[KINDS]):
        model = CatBoostClassifier(**QUICK).fit(missing, labels)
        save(model, tmp_path / "classes.onnx")
        label, probabilities = answers(tmp_path / "classes.onnx", missing)
        assert label.astype(str).tolist() == np.ravel(model.predict(missing)).astype(str).tolist()
        np.testing.assert_allclose(probabilities, model.predict_proba(missing), atol=1e-6)
    regression = CatBoostRegressor(**QUICK).fit(FEATURES, FEATURES[:, 0])
    save(regression, tmp_path / "values.onnx")
    np.testing.assert_allclose(answers(tmp_path / "values.onnx")[0][:, 0], regression.predict(FEATURES), rtol=1e-6)
    for loss in ("Poisson", "Tweedie:variance_power=1.5"):
        counts = CatBoostRegressor(loss_function=loss, **QUICK).fit(FEATURES, KINDS + 1)
        save(counts, tmp_path / "counts.onnx")
        raw = answers(tmp_path / "counts.onnx")[0][:, 0]
        np.testing.assert_allclose(np.exp(raw), counts.predict(FEATURES), rtol=1e-5)


def test_models_that_the_page_sends_the_other_way_need_it(save: Callable[[Any, Path], None], tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    words = np.column_stack([np.array(["a", "b", "c"])[KINDS], FEATURES.astype(object)])
    with pytest.raises(CatBoostError, match="does yet not support categorical features"):
        save(CatBoostClassifier(cat_features=[0], **QUICK).fit(words, KINDS), path)
    with pytest.raises(CatBoostError, match="Unexpected label type"):
        save(CatBoostClassifier(**QUICK).fit(FEATURES, KINDS == 0), path)
    for grow_policy in ("Depthwise", "Lossguide"):
        with pytest.raises(CatBoostError, match="Can save non symmetric trees only in"):
            save(CatBoostClassifier(grow_policy=grow_policy, **QUICK).fit(FEATURES, KINDS), path)
    for loss, targets in (("MultiRMSE", FEATURES[:, :2]), ("MultiQuantile:alpha=0.1,0.9", KINDS)):
        save(CatBoostRegressor(loss_function=loss, **QUICK).fit(FEATURES, targets), path)
        with pytest.raises(Exception, match="n_targets_or_classes"):
            answers(path)
    for loss, labels in (("MultiClassOneVsAll", KINDS), ("MultiLogloss", np.eye(3, dtype=int)[KINDS])):
        model = CatBoostClassifier(loss_function=loss, **QUICK).fit(FEATURES, labels)
        save(model, path)
        assert np.abs(answers(path)[1] - model.predict_proba(FEATURES)).max() > 0.01
