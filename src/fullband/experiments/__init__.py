"""Experiments: a grid of recipes with seeds, what is measured of each, and the report that says how sure it is."""

from fullband.experiments.config import Experiment, find_experiment, list_experiments, load_experiment
from fullband.experiments.jobs import Job, check_jobs, finished_results, jobs_of, run_job
from fullband.experiments.report import write_report
from fullband.experiments.summary import summarise

__all__ = [
    "Experiment",
    "Job",
    "check_jobs",
    "find_experiment",
    "finished_results",
    "jobs_of",
    "list_experiments",
    "load_experiment",
    "run_job",
    "summarise",
    "write_report",
]
