"""Models that MLflow saves, for the tests of the plug-in: MLflow itself says what they answer."""

from __future__ import annotations

import os
import subprocess
import sys
import types
import warnings
from pathlib import Path
from typing import Any

os.environ.update({"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true", "GIT_PYTHON_REFRESH": "quiet"})

import cloudpickle
import numpy as np
import pandas as pd
from sklearn.compose import make_column_transformer
from sklearn.datasets import load_wine
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the library warns of itself when it is imported
    import mlflow.pyfunc
    import mlflow.sklearn
    from mlflow.models import infer_signature

WINE, KINDS = load_wine(return_X_y=True, as_frame=True)
WINE = WINE.rename(columns={"od280/od315_of_diluted_wines": "od"})
CELLARS = pd.DataFrame({"alcohol": WINE["alcohol"], "colour": np.where(WINE["hue"] > 1, "red", "rosé")})
"""A table with a column of words."""

OPENER = """
import mlflow.pyfunc

class Opener(mlflow.pyfunc.PythonModel):
    def load_context(self, context):
        open(SECRET).read()

    def predict(self, context, model_input, params=None):
        return model_input

mlflow.models.set_model(Opener())
"""
"""A model from code that reads a file when it is loaded."""


ADDER = """
import mlflow.pyfunc
import only_here

class Adder(mlflow.pyfunc.PythonModel):
    def predict(self, context, model_input, params=None):
        return model_input + only_here.NUMBER

mlflow.models.set_model(Adder())
"""
"""A model whose module the server does not have."""


class Labels(mlflow.pyfunc.PythonModel):  # type: ignore[misc]
    """Several outputs by name, a parameter, dates, and words that it refuses."""

    def predict(self, context, model_input, params=None):  # type: ignore[no-untyped-def]  # hints would be enforced
        if "bad" in list(model_input["text"]):
            raise ValueError("'bad' has no label")
        end = (params or {}).get("end", "?")
        labels = [
            f"{text} {when.year}{end}" for text, when in zip(model_input["text"], model_input["day"], strict=True)
        ]
        return pd.DataFrame({"label": labels, "double": model_input["count"] * 2})


LABELLED = pd.DataFrame(
    {
        "text": ["älter", "younger"],
        "count": np.array([3, 1 << 40]),
        "day": pd.to_datetime(["2021-05-01", "1999-12-31T23:00:00"], format="ISO8601"),
    }
)


def wine(path: Path) -> Any:
    """The wine set as a tensor [rows, 13]: one array in, one out."""
    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=500)).fit(WINE.to_numpy(), KINDS)
    signature = infer_signature(WINE.to_numpy(), model.predict_proba(WINE.to_numpy()))
    mlflow.sklearn.save_model(model, path, signature=signature, pyfunc_predict_fn="predict_proba", **_plain())
    return mlflow.pyfunc.load_model(str(path))


def cellars(path: Path) -> Any:
    """A table with numbers and words; labels are words."""
    columns = make_column_transformer((OneHotEncoder(), ["colour"]), (StandardScaler(), ["alcohol"]))
    kinds = np.array(["barolo", "grignolino", "barbera"])[KINDS]
    model = make_pipeline(columns, LogisticRegression()).fit(CELLARS, kinds)
    mlflow.sklearn.save_model(
        model, path, signature=infer_signature(CELLARS, pd.DataFrame({"kind": kinds})), **_plain()
    )
    return mlflow.pyfunc.load_model(str(path))


def labels(path: Path) -> Any:
    """A pickled class of Python, whole: it is not installed where the model runs."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    signature = infer_signature(LABELLED, Labels().predict(None, LABELLED), params={"end": "!"})
    mlflow.pyfunc.save_model(path, python_model=Labels(), signature=signature, pip_requirements=[])
    return mlflow.pyfunc.load_model(str(path))


def opener(path: Path, secret: Path) -> None:
    """A model whose code reads a file."""
    code = path.parent / "opener.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    code.write_text(OPENER.replace("SECRET", repr(str(secret))))
    signature = infer_signature(np.ones((2, 2)), np.ones((2, 2)))
    secret.write_text("of another")
    mlflow.pyfunc.save_model(path, python_model=str(code), signature=signature, pip_requirements=[])
    code.unlink()


def adder(path: Path, environment: Path) -> None:
    """A model whose module is installed in an environment alone, which is made beside that of the tests."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    # an editable installation is found by what its .pth file runs
    (packages / "tests.pth").write_text(
        "".join(f"import site; site.addsitedir({one!r})\n" for one in sys.path if Path(one).is_dir())
    )
    (packages / "only_here.py").write_text("NUMBER = 42\n")
    code = path.parent / "adder.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    code.write_text(ADDER)
    sys.modules["only_here"] = types.ModuleType("only_here")  # saving runs the file
    try:
        signature = infer_signature(np.ones((2, 2)), np.ones((2, 2)))
        mlflow.pyfunc.save_model(path, python_model=str(code), signature=signature, pip_requirements=[])
    finally:
        del sys.modules["only_here"]
        code.unlink()


def _plain() -> dict[str, Any]:
    return {"pip_requirements": [], "serialization_format": "cloudpickle"}
