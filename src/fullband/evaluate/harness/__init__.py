"""lm-eval's tasks and models, joined to ours. Importing a module of this package may load lm-eval; the package itself does not."""
