"""The picture of a rehearsed step, from a made-up report."""

import pytest
from fake_rehearsal import fake_rehearsal
from matplotlib.collections import PolyCollection

from jaxpar.base.errors import UserError
from jaxpar.show.timeline import timeline_figure


def test_every_event_is_drawn_in_its_lane_and_the_close_up_has_a_part():
    report = fake_rehearsal()
    timeline = report["timeline"]
    whole, close = timeline_figure(report).axes
    assert [tick.get_text() for tick in whole.get_yticklabels()] == ["phase", *timeline["lanes"]]

    def bars(axes, row):
        paths = [
            path
            for drawn in axes.collections
            if isinstance(drawn, PolyCollection)
            for path in drawn.get_paths()
        ]
        return sum(round(float(path.vertices[:, 1].mean())) == row for path in paths)

    for row in range(len(timeline["lanes"])):
        of_lane = sum(int(event[0]) == row for event in timeline["events"])
        assert bars(whole, row + 1) == of_lane and bars(close, row + 1) <= of_lane
    assert 0 < bars(close, 1) < bars(whole, 1) / 8
    assert whole.get_xlim() == pytest.approx((0, 1e3 * report["time"]["step"]))
    tasks = bars(whole, 1)  # of which the close-up has about a hundred, more than a 32nd here
    assert close.get_xlim()[1] - close.get_xlim()[0] == pytest.approx(
        1e3 * report["time"]["step"] * 100 / tasks
    )


def test_a_report_without_its_timeline():
    report = fake_rehearsal()
    del report["timeline"]
    with pytest.raises(UserError, match="kept without its timeline"):
        timeline_figure(report)


def test_several_reports_on_one_scale_have_a_panel_each_and_no_close_up():
    report = fake_rehearsal()
    short = fake_rehearsal()
    short["timeline"]["phases"] = ["forward"] * len(short["timeline"]["phases"])
    short["time"]["step"] /= 2
    whole, half = timeline_figure(report, short).axes
    assert whole.get_xlim() == half.get_xlim() == pytest.approx((0, 1e3 * report["time"]["step"]))
    assert [tick.get_text() for tick in half.get_yticklabels()] == short["timeline"]["lanes"]
