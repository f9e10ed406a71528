"""Evaluation of rounds: accuracies and their spread over clients, best and last; bytes sent."""

from rayfl.evaluation.groups import ByGroup, TestSets
from rayfl.evaluation.ledger import Ledger, Transfer
from rayfl.evaluation.metrics import METRICS, Score, Scores, accuracy, perplexity, summary
from rayfl.evaluation.sharing import EvaluationPlan, Job
from rayfl.evaluation.tracker import BestLast, LocalTests

__all__ = [
    "METRICS",
    "BestLast",
    "ByGroup",
    "EvaluationPlan",
    "Job",
    "Ledger",
    "LocalTests",
    "Score",
    "Scores",
    "TestSets",
    "Transfer",
    "accuracy",
    "perplexity",
    "summary",
]
