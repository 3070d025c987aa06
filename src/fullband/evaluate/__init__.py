"""Evaluation: what a model's feedback passes do to its loss and its answers."""

from fullband.evaluate.loss import LossReport, PassesLoss, PositionAccuracy, accuracy_by_position, loss_by_passes

__all__ = ["LossReport", "PassesLoss", "PositionAccuracy", "accuracy_by_position", "loss_by_passes"]
