"""Loggers, which write the curves of a run elsewhere: TensorBoard, MLflow, Weights & Biases, plug-ins."""

from rayfl.loggers.base import Log, LoggedRun, Logger, OpenLoggers
from rayfl.settings import Registry

LOGGERS = Registry("logger", "rayfl.loggers", Logger)

__all__ = ["LOGGERS", "Log", "LoggedRun", "Logger", "OpenLoggers"]
