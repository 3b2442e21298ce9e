"""``jaxinf report``: a page about one run or several, from their log directories.

    LOG_DIR ─ logs ─► Logs ─ figures ─► plotly's figures ─ page ─► report.html

Invariant: what is in a log is a stranger's word: bounded, escaped, and never a script.
"""

from jaxinf.cli.report.page import write_report

__all__ = ["write_report"]
