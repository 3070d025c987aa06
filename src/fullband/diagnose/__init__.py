"""Does the feedback work, and is it stable? Repeated passes, rollouts, perturbations, reachability, and a verdict in words."""

from fullband.diagnose.diagnosis import Diagnosis, DiagnosisSettings, diagnose
from fullband.diagnose.numbers import Trace
from fullband.diagnose.perturb import Perturbation, perturb
from fullband.diagnose.reach import Reach, measure_reach
from fullband.diagnose.rollout import LongRollout, roll_out
from fullband.diagnose.sequences import rows_of_documents, rows_of_task
from fullband.diagnose.trace import trace_passes
from fullband.diagnose.verdict import Verdict, judge

__all__ = [
    "Diagnosis",
    "DiagnosisSettings",
    "LongRollout",
    "Perturbation",
    "Reach",
    "Trace",
    "Verdict",
    "diagnose",
    "judge",
    "measure_reach",
    "perturb",
    "roll_out",
    "rows_of_documents",
    "rows_of_task",
    "trace_passes",
]
