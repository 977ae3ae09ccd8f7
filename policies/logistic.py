"""Logistic regression over named features, calibrated, in pure Python."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator

Finite = Annotated[float, Field(allow_inf_nan=False)]


class Calibrated(BaseModel):
    """sigmoid(bias + sum of weight * feature), then the calibration curve through `points`.

    `points` are (raw probability, calibrated probability), as isotonic regression gives
    them: between two points the curve is straight, outside it is flat. None are needed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    bias: Finite = 0.0
    weights: dict[str, Finite]
    # Stands in for features that are not there.
    fill: dict[str, Finite] = Field(default_factory=dict)
    points: tuple[tuple[Finite, Finite], ...] = ()

    @field_validator("points")
    @classmethod
    def _rising(cls, points: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], ...]:
        for (x0, y0), (x1, y1) in pairwise(points):
            if x1 <= x0 or y1 < y0:
                raise ValueError("points must rise from left to right")
        if any(not 0 <= value <= 1 for point in points for value in point):
            raise ValueError("points are pairs of probabilities")
        return points

    def probability(self, features: Mapping[str, float]) -> float:
        weights = self.weights
        z = self.bias
        for name, value in features.items():
            if value and (weight := weights.get(name)):
                z += weight * value
        for name, value in self.fill.items():
            if name not in features:
                z += weights.get(name, 0.0) * value
        raw = 1 / (1 + math.exp(-z)) if z > -700 else 0.0
        return self.calibrated(raw)

    def gain(self, features: Mapping[str, float]) -> float:
        """Expected quality of the large tier less the small one's, -1 to 1.

        For a score that was fitted to "the large model does better", ties counted half.
        """
        return 2 * self.probability(features) - 1

    def calibrated(self, raw: float) -> float:
        """A raw probability through the calibration curve."""
        points = self.points
        if not points:
            return raw
        place = bisect_right(points, raw, key=lambda point: point[0])
        if place == 0:
            return points[0][1]
        if place == len(points):
            return points[-1][1]
        (x0, y0), (x1, y1) = points[place - 1], points[place]
        return y0 + (y1 - y0) * (raw - x0) / (x1 - x0)
