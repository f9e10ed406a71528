"""Where the curves of a run go besides its own tables: TensorBoard, MLflow, Weights & Biases, your own."""

from rayfl.loggers.base import Log, LoggedRun, Logger, OpenLoggers
from rayfl.settings import Registry

LOGGERS = Registry("logger", "rayfl.loggers", Logger)

__all__ = ["LOGGERS", "Log", "LoggedRun", "Logger", "OpenLoggers"]
