"""Reports of evaluations: results.json, Markdown, and the paper's tables beside them. Pictures and pages are made by `fullband.plots`."""
