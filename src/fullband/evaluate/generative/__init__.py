"""Generative evaluation (§4.2): problems, rollouts in each mode, grades, Pass@k and lengths."""
