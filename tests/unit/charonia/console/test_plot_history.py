"""What plots keep of each reading."""

from __future__ import annotations

from charonia.console.plot_history import PlotHistory


def test_rows_come_back_as_columns_of_each_model() -> None:
    plots = PlotHistory(3)
    for at in range(4):
        plots.add(float(at), {"": (1.0 * at, None, None, 5.0), "m": (0.5, 0.25, 3.5, 0.0)})
    plots.add(9.0, {"": (None, None, None, None)})
    assert plots.columns("") == [[2.0, 3.0, 9.0], [2.0, 3.0, None], [None] * 3, [None] * 3, [5.0, 5.0, None]]
    assert plots.columns("m") == [
        [2.0, 3.0, 9.0],
        [0.5, 0.5, None],
        [0.25, 0.25, None],
        [3.5, 3.5, None],
        [0.0, 0.0, None],
    ]
    assert plots.last("m") == [9.0, None, None, None, None]
    plots.keep(1)
    assert plots.columns("")[0] == [9.0]


def test_readings_of_the_same_models_share_their_names() -> None:
    plots = PlotHistory(10)
    for at in range(5):
        plots.add(float(at), {f"model {number}": (1.0, 2.0, 3.0, 4.0) for number in range(3)})
    assert len({id(names) for _, names, _ in plots._readings}) == 1
    assert all(values.itemsize * len(values) == 3 * 4 * 8 for _, _, values in plots._readings)
